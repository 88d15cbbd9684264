"""Small files of every kind that are right: what ``tests/fuzz.py`` changes."""

from __future__ import annotations

from typing import Any

SCENARIO: dict[str, Any] = {
    "cluster": {
        "topology": "dgx-1v",
        "nodes": 1,
        "gpus_per_node": 2,
        "changes": [{"match": "node0/gpu0", "factor": 0.5}],
        "slow": [{"ranks": [1], "speed": 0.9}],
    },
    "model": {"name": "resnet18", "dtype": "fp32"},
    "strategy": {"kind": "ddp", "micro_batch_size": 2, "bucket_cap_mb": 25},
    "run": {"steps": 1, "seed": 0, "jitter": 0.01, "fidelity": "flow", "optimizer": "sgd"},
}
GPT = {**SCENARIO, "model": {"hf_config": "config.json"}, "cluster": {"topology": "dgx-1v", "gpus_per_node": 2}}
TOPOLOGY: dict[str, Any] = {
    "name": "mine",
    "title": "two GPUs",
    "node": {
        "device": "A100-SXM4-80GB",
        "vertices": [
            {"names": "gpu[0-1]", "kind": "gpu"},
            {"names": "nic[0-1]", "kind": "nic", "bandwidth": "25 GB/s", "source": "made"},
        ],
        "links": [
            {
                "a": "gpu[0-1]",
                "b": "nic[0-1]",
                "pattern": "zip",
                "kind": "pcie",
                "bandwidth": "25 GB/s",
                "latency": "500 ns",
                "source": "made",
            },
            {"a": "gpu0", "b": "gpu1", "kind": "nvlink", "bandwidth": "50 GB/s", "latency": "500 ns", "source": "made"},
        ],
    },
    "fabric": {"kind": "one_switch", "port_latency": "1 us", "switch_latency": "300 ns", "source": "made"},
}
DEVICE: dict[str, Any] = {
    "device": {
        "name": "mine",
        "extends": "H200-SXM5-141GB",
        "generation": "sm90",
        "memory": "140.4 GiB",
        "bandwidth": "4800 GB/s",
        "peak": {"fp32": "67 TFLOP/s", "bf16": "989 TFLOP/s"},
        "sms": 132,
        "clock": "1829 MHz",
        "l2": "60 MiB",
        "nvlinks": 18,
        "tdp_w": 700,
        "usd_per_gpu_hour": 3.0,
        "matmul": {"bf16": 0.8},
        "stream": 0.87,
        "sources": {"memory": "data sheet"},
    }
}
SWEEP: dict[str, Any] = {
    "base": "mine.toml",
    "set": {"run.steps": 1},
    "axes": [
        {"key": "strategy.micro_batch_size", "values": [1, 2]},
        {"key": "run.seed", "range": {"start": 0, "stop": 2, "step": 1}},
    ],
    "sample": 2,
}
PLAN: dict[str, Any] = {
    "model": {"name": "resnet18"},
    "machines": [{"topology": "dgx-1v", "nodes": [1], "usd_per_gpu_hour": 2.0}],
    "batch": {"samples": [16, 32]},
    "limits": {"gpus": 8, "tokens": 1e9, "deadline": "60 d"},
    "try": {"micro_batch_size": [2], "activation_checkpointing": ["none"], "strategies": [{"kind": "ddp"}]},
}
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TRACE: dict[str, Any] = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0.0, "dur": 90.0},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "tid": 7,
            "ts": 1.0,
            "dur": 40.0,
            "args": {"stream": 7, "device": 0, "correlation": 3},
        },
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            "pid": 0,
            "tid": 20,
            "ts": 50.0,
            "dur": 30.0,
            "args": {
                "stream": 20,
                "Collective name": "allreduce",
                "In msg nelems": 1024,
                "Group size": 1,
                "dtype": "Float",
                "correlation": 4,
            },
        },
    ],
}
LOG = (
    "# nThread 1 nGpus 8 minBytes 8 maxBytes 1024\n# Rank 0 Pid 1 on host device 0 [0x07] NVIDIA A100-SXM4-80GB\n"
    "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
    "8 2 float sum -1 20.51 0.00 0.00 0 20.02 0.00 0.00 0\n1024 256 float sum -1 21.51 0.05 0.08 0 21.02 0.05 0.09 0\n"
)
MODEL_FILE: dict[str, Any] = {
    "format": "clustersim-model",
    "version": 1,
    "name": "mine",
    "source": "my.py:build",
    "torch": "2.13.0",
    "inputs": ["tokens[2, 16]"],
    "batch": 2,
    "sample": "sequence",
    "seq_len": 16,
    "hidden": 8,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 4,
    "vocab": 32,
    "chained": True,
    "notes": ["made"],
    "layers": [
        {
            "name": "words",
            "kind": "embedding",
            "work": 0,
            "tensors": [{"name": "words.weight", "numel": 256, "width": 8}],
        },
        {
            "name": "blocks.{}",
            "kind": "block",
            "work": 1,
            "count": 2,
            "tensors": [{"name": "blocks.{}.weight", "numel": 64, "width": 8}],
        },
    ],
    "works": [
        {"fp32": {"kernels": [{"name": "embedding", "kind": "memory", "nbytes": 1024.0, "backward_launches": 5}]}},
        {
            "fp32": {
                "boundary": 512.0,
                "kernels": [
                    {"name": "up", "kind": "gemm", "m": 16, "n": 8, "k": 8, "flops": 2048.0, "backward_flops": 4096.0},
                    {"name": "attention", "kind": "attention", "heads": 2, "head_dim": 4, "seq": 16, "flops": 2048.0},
                    {"name": "conv", "kind": "conv", "m": 16, "n": 8, "k": 8, "nbytes": 1024.0, "flops": 2048.0},
                    {"name": "gelu", "kind": "memory", "nbytes": 1024.0, "kept": 512.0, "working": 512.0},
                ],
            }
        },
    ],
}
TRACED = {**SCENARIO, "model": {"file": "mine.model.json"}, "cluster": {"topology": "dgx-1v", "gpus_per_node": 2}}
MOE_CONFIG: dict[str, Any] = CONFIG | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SPLIT: dict[str, Any] = {
    "cluster": {"topology": "hgx-a100"},
    "model": {"hf_config": "moe.json", "dtype": "bf16"},
    "strategy": {"kind": "ddp", "micro_batch_size": 1},
    "run": {"steps": 1},
    "parallel": {"pp": 2, "ep": 2, "microbatches": 4},
}
CAMPAIGN: dict[str, Any] = {
    "duration": "2 d",
    "failures": [{"name": "gpu", "rate": "1 per 20 node-days", "scope": "node"}],
    "detection": {"report": "2 min"},
    "recovery": {"policy": "replace", "replace": "1 min", "restart": "4 min"},
    "checkpoints": [{"every": "1 h", "stall": "1 min"}],
    "storage": {"write": "1 GB/s", "read": "2 GB/s"},
    "nodes": {"spares": 1, "repair": "3 h"},
    "degraded": [{"name": "hot", "rate": "1 per 30 node-days", "lasts": "2 h", "factor": 1.5}],
}
SCHEDULE = b"0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
ROUTING = b"10,20,30,40\n1,1,1,1\n0,0,3,4\n5,5,5,5\n"
COMMS = (
    b"Comm. Op            Message Size        Count       Total Latency(ms)   Avg Latency(ms)     tput_avg (Gbps)     "
    b"busbw_avg (Gbps)\nall_reduce\n                    1.0 MB              100         20.0                0.20"
    b"                83.9                157.3\n"
)
CAPTURED = (
    b'{"clustersim_capture": 1, "part": "collectives", "backend": "nccl", "device": "a100"}\n'
    b'{"kind": "all_reduce", "size": 1048576, "time": 50.5, "time_min": 50.0, "ranks": 8, "type": "float", "redop": '
    b'"sum", "nodes": 1, "groups_at_once": 1, "iterations": 20, "layout": "world", "busbw": 36.3}\n'
)
NCCL_TABLE = (
    b"case_id,topology,gpus_per_node,nodes,ranks,collective,dtype,size_bytes,time_us,busbw_GBps\n"
    b"a,hgx-h100,8,1,8,all_reduce,float,1048576,50.5,36.3\nb,hgx-h100,8,2,16,all_gather,float,33554432,182.8,321.1\n"
)
