import nemo_run as run
from mine import faster
from nemo.collections import llm

recipe = llm.mixtral_8x7b.pretrain_recipe(num_nodes=8)
recipe = faster(recipe)
run.run(recipe)
