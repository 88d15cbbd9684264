"""What lesson 7 says. It runs behind its last cell, in the same kernel: names not made here are the lesson's."""
# ruff: noqa: F821

assert after < 0.7 * before
assert held_out < before

assert {"share.nvlink/Simple", "hop.nvlink/LL"} <= {one.knob.name for one in told}
assert all(one.low <= one.value <= one.high for one in told)

assert inside < 0.03 < 0.08 < outside
for seconds in (fit.after, from_large):  # a size of its own peak, or the next
    assert abs(worst - int(np.argmax(np.abs(seconds / measured - 1) * (SIZES >= 2**22)))) <= 1
assert at_least[worst] > 0.05

assert max(abs(row["error"]) for row in predicted[:3]) < 0.05 < abs(predicted[3]["error"])

assert abs(np.median(errors[0.25]) - np.median(errors[1.0])) < 0.015
assert errors[0.0625][3] < 0.7 * errors[1.0][3]
assert exposed < 0.05

assert abs(mended) < 0.03 < 0.08 < abs(usual)
assert 1.05 < fitted_step.kernels < 1.2
assert abs(fitted_step.host - 1.0) < 0.02
assert rows[1]["half are within"] < 0.7 * rows[0]["half are within"]

# What the answers rest on.
small = SIZES <= 2**15
tiny = calibrate_logs([log("small.csv", zip(SIZES[small], np.array(US)[small], strict=True))], "dgx-1v").fits[0]
alone = {"cluster.gpus_per_node": 1, "strategy": {"kind": "single", "micro_batch_size": 32}}
ONE = {"resnet50": 0.097, "resnet101": 0.162, "resnext101_32x8d": 0.415, "resnext50_32x4d": 0.145}
one_gpu = {}
for name, own in ONE.items():
    changes = {"cluster.topology": str(mine), "model.name": name, "run.optimizer": "sgd_momentum", **alone}
    one_gpu[name] = clustersim.load("ddp_resnet50_1x8_v100", changes).run().summary["step_time_s"] / own - 1
assert next(one.refused for one in tiny.constants if one.knob.name == "share.nvlink/Simple")
assert min(one_gpu, key=one_gpu.get) == "resnext50_32x4d"
assert one_gpu["resnext50_32x4d"] < -0.07
assert all(abs(value) < 0.07 for name, value in one_gpu.items() if name != "resnext50_32x4d")

assert sorted(hasty.apart) == [0, 3]
assert "contradicts" in hasty.apart[0]
assert "faster than the wires allow" in hasty.apart[3]
rest = with_numbers("rest", {size: COPIED[size] for size in ("1 MiB", "64 MiB")})
assert hasty.found.constants == rest.found.constants
