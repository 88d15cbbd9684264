"""Programs with a Trainer of Lightning: its devices, its strategies by name, and the model that they load."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

PROGRAM = """
import lightning as L
from transformers import AutoModelForCausalLM, AutoTokenizer
NAME = "Qwen/Qwen3-4B"
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained("other/words")
        self.model = {model}
trainer = L.Trainer({arguments})
trainer.fit(Module())
"""
LOADED = "AutoModelForCausalLM.from_pretrained(NAME)"


def read(arguments, loaded=LOADED, model=None):
    text = PROGRAM.format(arguments=arguments, model=loaded)
    return exchange.read([document(text, "train.py")], {"topology": "hgx-h100", "nodes": 1}, model=model)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("devices='0,1'", 2),
        ("devices='3,'", 1),
        ("devices='4'", 4),
        ("devices=[1, 2, 3]", 3),
        ("gpus=4", 4),
        ("gpus='0,1,2'", 3),
        ("devices='-1'", None),
        ("devices='auto'", None),
        ("gpus=-1", None),
    ],
)
def test_devices_are_counted_as_lightning_counts_them(words, gpus):
    made = read(f"{words}, strategy='ddp'")
    assert made.scenario.table["cluster"].get("gpus_per_node") == gpus
    assert not made.unknown


@pytest.mark.parametrize(
    ("name", "kind", "optimizer", "param"),
    [
        ("ddp_spawn", "ddp", None, None),
        ("ddp_notebook", "ddp", None, None),
        ("deepspeed_stage_2", "zero", None, None),
        ("deepspeed_stage_2_offload", "zero", "cpu", None),
        ("deepspeed_stage_3_offload", "zero", "cpu", "cpu"),
    ],
)
def test_strategies_are_known_by_their_names(name, kind, optimizer, param):
    had = exchange.canonical(read(f"devices=8, precision='bf16-mixed', strategy='{name}'").scenario)
    assert had["strategy.kind"] == kind
    assert had.get("strategy.zero_optimization.offload_optimizer.device") == optimizer
    assert had.get("strategy.zero_optimization.offload_param.device") == param


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("devices=4, strategy='dp'", "'dp' is not a choice that is played"),
        ("devices=4, strategy='horovod'", "'horovod' is not a choice that is played"),
        ("devices=4, accelerator='tpu'", "trains on TPUs"),
        ("devices=4, accelerator='cpu'", "trains on CPUs"),
        ("devices=4, accelerator='hpu'", "trains on Gaudis"),
    ],
)
def test_what_is_no_ddp_of_gpus_is_refused(words, refusal):
    """Data parallelism of one process was another framework's, and any accelerator a GPU."""
    with pytest.raises(ScenarioError, match=refusal):
        read(words)


def test_the_model_that_a_program_loads_is_its_model():
    assert read("devices=8").scenario.file.model.name == "qwen3-4b"
    assert read("devices=8", model="llama3-8b").scenario.file.model.name == "llama3-8b"
    with pytest.raises(ScenarioError, match="no shipped model is of this name"):
        read("devices=8", "AutoModelForCausalLM.from_pretrained('me/mine')")


@pytest.mark.parametrize(
    "loaded",
    ["AutoModel.from_pretrained(NAME)", f"{LOADED}, AutoModelForCausalLM.from_pretrained('a/b')", "own(NAME)"],
)
def test_a_part_of_a_module_or_two_models_are_asked_for(loaded):
    with pytest.raises(ScenarioError, match="does not say what model it is"):
        read("devices=8", loaded)


def test_adapters_that_a_program_makes_are_refused():
    """They were left out without a word."""
    with pytest.raises(ScenarioError, match=r"\(line 9\): get_peft_model trains adapters, which are not read"):
        read("devices=8", f"get_peft_model({LOADED}, config)", model="qwen3-4b")
