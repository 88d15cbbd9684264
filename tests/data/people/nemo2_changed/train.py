import nemo_run
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning
from nemo.collections.llm.gpt.data import PreTrainingDataModule
from nemo.collections.llm.recipes.llama31_405b import pretrain_recipe as whole
from nemo.collections.llm.recipes.precision.mixed_precision import bf16_with_fp8_mixed
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

NODES = 36


def tokens(paths, length: int = 4096):
    held = nemo_run.Config(
        PreTrainingDataModule, paths=paths, seq_length=length, micro_batch_size=1, global_batch_size=1
    )
    held.global_batch_size = NODES * 8
    return held


def made():
    job = whole(name="fp8", dir="/out", num_nodes=NODES, num_gpus_per_node=8)
    job.trainer.strategy = nemo_run.Config(
        lightning.MegatronStrategy,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=9,
        virtual_pipeline_model_parallel_size=7,
        context_parallel_size=1,
        sequence_parallel=True,
        ddp=nemo_run.Config(DistributedDataParallelConfig, overlap_grad_reduce=True),
    )
    job.trainer.plugins = bf16_with_fp8_mixed()
    job.trainer.max_steps = 20
    job.trainer.callbacks.append(nemo_run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True))
    return job


if __name__ == "__main__":
    run = made()
    run.data = tokens(["/data/a"])
    run.model.config.recompute_granularity = "selective"
    with nemo_run.Experiment("one") as experiment:
        experiment.add(run, name="fp8")
