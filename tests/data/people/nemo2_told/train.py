import argparse

from nemo.collections import llm

words = argparse.ArgumentParser()
words.add_argument("--tp", type=int)
given = words.parse_args()


class Job:
    def recipe(self):
        made = llm.llama3_8b.pretrain_recipe(num_nodes=2)
        made.trainer.strategy.tensor_model_parallel_size = given.tp
        return made
