import nemo_run
from nemo.collections import llm


def recipe(nodes: int = 4):
    made = llm.llama3_70b.pretrain_recipe(dir="/ckpt", name="llama3_70b", num_nodes=nodes, num_gpus_per_node=8)
    made.trainer.strategy.tensor_model_parallel_size = 4
    made.data.global_batch_size = 128
    return made


if __name__ == "__main__":
    nemo_run.run(recipe(), executor=nemo_run.LocalExecutor(ntasks_per_node=8, launcher="torchrun"))
