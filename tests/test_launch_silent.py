"""Options that were left out without a word, or refused without saying what to do, though they change a step."""

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.scenario.run.parts import model_of


def read(*files, **more):
    return exchange.read([document(text, name) for name, text in files], {"topology": "hgx-h100", "nodes": 1}, **more)


# ---- OLMo: norms without weights, without biases --------------------------------------------------------------------

OLMO = """
model: {{d_model: 512, n_heads: 8, n_layers: 4, mlp_ratio: 8, rope: true, block_type: sequential, {norms},
  activation_type: swiglu, max_sequence_length: 1024, vocab_size: 4096, embedding_size: 4096, weight_tying: true}}
fsdp: {{wrapping_strategy: null, precision: mixed}}
optimizer: {{name: adamw}}
precision: amp_bf16
global_train_batch_size: 16
device_train_microbatch_size: 2
"""
BLOCKS = 4 * (4 * 512 * 512 + 3 * 512 * 2048) + 4096 * 512
NORMS = 2 * 4 + 1


@pytest.mark.parametrize(
    ("norms", "vectors"),
    [
        ("include_bias: false, layer_norm_with_affine: false", 0),
        ("include_bias: false", 1),
        ("include_bias: false, bias_for_layer_norm: true", 2),
        ("include_bias: false, layer_norm_type: rms", 1),
    ],
)
def test_norms_of_olmo_have_the_weights_and_biases_that_its_file_says(norms, vectors):
    made = model_of(read(("f.yaml", OLMO.format(norms=norms))).scenario)
    assert made.parameters == BLOCKS + NORMS * vectors * 512


@pytest.mark.parametrize("words", ["model.clip_qkv=8.0", "softmax_auxiliary_loss=true"])
def test_what_olmo_computes_besides_is_said_not_to_be_played(words):
    name, _, value = words.partition("=")
    text = OLMO.format(norms="include_bias: false")
    text = text.replace("n_layers", f"clip_qkv: {value}, n_layers") if "clip" in name else f"{text}{name}: {value}\n"
    assert name in read(("f.yaml", text)).unplayed


# ---- DeepSpeed's file under a script's own name ---------------------------------------------------------------------

TRAIN = "train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 --per_device_train_batch_size 2 --max_length 512"
ZERO_3 = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'


@pytest.mark.parametrize("name", ["ds_config_path", "ds_cfg", "ds_config", "deepspeed_cfg", "deepspeed_config_path"])
@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 8", "deepspeed --num_gpus 8"])
def test_deepspeeds_file_is_asked_for_and_read_whatever_a_script_calls_it(name, launcher):
    """It was an unknown option, and the run was DDP."""
    script = ("run.sh", f"{launcher} {TRAIN} --{name} conf/ds.json")
    with pytest.raises(ScenarioError, match=rf"--{name} names conf/ds.json; give that file too"):
        read(script)
    had = exchange.canonical(read(script, ("ds.json", ZERO_3)).scenario)
    assert (had["strategy.kind"], had["strategy.zero_optimization.stage"]) == ("zero", 3)


def test_a_launcher_of_deepspeed_without_its_configuration_is_said_to_be_ddp():
    made = read(("run.sh", f"deepspeed --num_gpus 8 {TRAIN}"))
    assert any("no option names its configuration: DDP" in note for note in made.notes)
    assert not any("DDP" in note for note in read(("run.sh", f"torchrun --nproc_per_node 8 {TRAIN}")).notes)


# ---- Types that contradict each other -------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["bf16", "fp16", "fp8", "no"])
@pytest.mark.parametrize("own", ["bf16", "fp16"])
def test_the_trainers_16_bits_count_against_its_launchers(launcher, own):
    """TrainingArguments sets what accelerate reads, after the launcher did; it was refused."""
    command = f"accelerate launch --mixed_precision {launcher} --num_processes 8 {TRAIN.replace('bf16', own)}"
    made = read(("run.sh", command))
    assert exchange.canonical(made.scenario)["model.dtype"] == own
    told = [note for note in made.notes if "counts against" in note]
    assert len(told) == (launcher not in {own, "no"})
    assert all(f"--{own} counts against mixed_precision '{launcher}' of run.sh" in note for note in told)


# ---- The length of a sample -----------------------------------------------------------------------------------------

LITGPT = """
checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B
precision: bf16-true
devices: 8
lora_r: 8
train: {global_batch_size: 32, micro_batch_size: 1, lr_warmup_steps: 10}
"""


def test_a_length_that_no_file_of_litgpt_says_is_given_beside_it():
    with pytest.raises(ScenarioError, match="give --seq-len, such as --seq-len 512"):
        read(("f.yaml", LITGPT))
    assert read(("f.yaml", LITGPT), seq_len=512).scenario.file.model.seq_len == 512


def test_a_length_that_is_asked_for_counts_and_the_files_own_is_said():
    made = read(("run.sh", f"torchrun --nproc_per_node 8 {TRAIN}"), seq_len=1024)
    assert made.scenario.file.model.seq_len == 1024
    assert any("seq_len = 1,024 as asked for" in note and "says 512" in note for note in made.notes)


# ---- Other names of what the Trainer has ----------------------------------------------------------------------------

EIGHT = f"torchrun --nproc_per_node 8 {TRAIN}"


@pytest.mark.parametrize(
    "words", ["--gradient_accumulation 4", "--grad_acc 4", "--deepspeed_stage 3", "--grad_accum 2"]
)
def test_passes_and_shards_under_a_name_that_nobody_knows_are_not_left_out(words):
    with pytest.raises(ScenarioError, match=rf"{words.split()[0]} \S+ would"):
        read(("run.sh", f"{EIGHT} {words}"))


@pytest.mark.parametrize("words", ["--use_8bit_adam", "--adam8bit", "--use_ema True", "--recompute", "--dropout 0.1"])
def test_what_a_script_of_its_own_does_besides_is_said_not_to_be_played(words):
    assert words.split()[0] in read(("run.sh", f"{EIGHT} {words}")).unplayed


def test_a_zero_stage_of_a_script_has_the_type_that_the_script_says():
    """It was "--bf16 and --dtype True contradict each other"."""
    had = exchange.canonical(read(("run.sh", f"{EIGHT} --zero_stage 3")).scenario)
    assert (had["strategy.zero_optimization.stage"], had["model.dtype"]) == (3, "bf16")


# ---- "auto" that nobody fills in, flags that stand alone, tasks, images ----------------------------------------------

AUTO = '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}'


def test_a_stage_that_is_auto_is_accelerates_or_asked_for():
    own = "accelerate launch --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --num_processes 8 "
    made = read(("a.sh", f"{own} --deepspeed_config_file ds.json {TRAIN}"), ("ds.json", AUTO))
    zero = made.tables["strategy"]["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (3, "cpu")
    with pytest.raises(ScenarioError, match="stage auto is filled in by accelerate's zero_stage"):
        read(("a.sh", f"torchrun --nproc_per_node 8 {TRAIN} --deepspeed ds.json"), ("ds.json", AUTO))


def test_what_no_trainer_fills_in_is_not_said_to_be():
    text = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}}'
    with pytest.raises(ScenarioError, match="stage3_param_persistence_threshold alone; write the value"):
        read(("a.sh", f"torchrun --nproc_per_node 8 {TRAIN} --deepspeed ds.json"), ("ds.json", text))


@pytest.mark.parametrize("flag", ["--fault_tolerance.enable", "--fault_tolerance.enable=true"])
def test_a_flag_that_stands_alone_is_refused_as_one_that_says_true(flag):
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 128\n'
    command = f"torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file t.toml {flag}"
    with pytest.raises(ScenarioError, match="averages replicas over torchft"):
        read(("t.toml", text), ("run.sh", command))


MEGATRON = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 64"


def test_a_task_of_megatron_is_refused_and_an_unfused_rotation_said():
    own = f"{MEGATRON} --seq-length 512 --max-position-embeddings 512 --fp16"
    with pytest.raises(ScenarioError, match="finetunes or evaluates a model by a task"):
        read(("a.sh", f"torchrun --nproc_per_node 8 tasks/main.py --task RACE {own}"))
    made = read(("a.sh", f"torchrun --nproc_per_node 8 pretrain_gpt.py {own} --no-rope-fusion"))
    assert list(made.unplayed) == ["--no-rope-fusion"]


FACTORY = """
model_name_or_path: Qwen/Qwen3-VL-4B-Instruct
stage: sft
template: qwen3_vl
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
"""


@pytest.mark.parametrize(("pixels", "side"), [(50176, 224), (60000, 224), (16384, 128), (10**7, 448)])
def test_images_are_as_small_as_a_launch_file_allows(pixels, side):
    made = read(("a.yaml", f"{FACTORY}image_max_pixels: {pixels}\n"))
    assert any(f"{side} x {side} pixels" in note and f"{pixels:,}" in note for note in made.notes)
    whole = read(("a.yaml", FACTORY))
    assert (model_of(made.scenario).flops_per_sample() < model_of(whole.scenario).flops_per_sample()) == (side < 448)


@pytest.mark.parametrize("pixels", ["many", "100", "-5"])
def test_a_size_of_images_that_is_none_is_refused(pixels):
    with pytest.raises(ScenarioError, match="must be a number of pixels"):
        read(("a.yaml", f"{FACTORY}image_max_pixels: {pixels}\n"))


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("./distributed_train.sh 8 /data --model resnet50 -b 256 --amp", "timm"),
        ("torchrun --nproc_per_node 8 train.py /data --model vit_b --aa rand-m9 --amp", "timm"),
        ("torchrun --nproc_per_node 8 -m open_clip_train.main --model ViT-B-32 --batch-size 256", "OpenCLIP"),
        ("python -m training.main --model RN50 --csv-img-key filepath", "OpenCLIP"),
        ("accelerate launch train_dreambooth_lora.py --instance_prompt x --resolution 512", "Diffusers"),
        ("accelerate launch my.py --pretrained_model_name_or_path a --resolution 64 --train_batch_size 1", "Diffusers"),
    ],
)
def test_programs_of_images_are_refused_by_name(command, title):
    with pytest.raises(ScenarioError, match=f"is of {title}, whose files are not read"):
        read(("run.sh", command))


# ---- threads of ranks that update on the host -----------------------------------------------------------------------

AWAY = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true}}'
COMMAND = f"{TRAIN} --deepspeed ds.json"


@pytest.mark.parametrize(
    ("launcher", "threads", "bound", "noted"),
    [
        ("torchrun --nproc_per_node 8", None, False, False),
        ("deepspeed --bind_cores_to_rank --num_gpus 8", None, True, False),
        ("deepspeed --num_gpus 8", "all", False, True),
        ("export OMP_NUM_THREADS=12\ndeepspeed --num_gpus 8", 12, False, False),
        ("OMP_NUM_THREADS=12 torchrun --nproc_per_node 8", 12, False, False),
        ("OMP_NUM_THREADS=12 deepspeed --bind_cores_to_rank --num_gpus 8", None, True, False),
        ("accelerate launch --num_processes 8 --num_cpu_threads_per_process 6", 6, False, False),
    ],
)
def test_threads_of_an_optimizer_on_the_host_are_those_of_its_launcher(launcher, threads, bound, noted):
    """They were left out without a word, where a third of the step is an optimizer on one thread a rank."""
    made = read(("train.sh", f"{launcher} {COMMAND}\n"), ("ds.json", AWAY))
    strategy = made.scenario.config
    assert (strategy.host_threads, strategy.bind_cores) == (threads, bound)
    assert any("sets no OMP_NUM_THREADS" in note for note in made.notes) == noted
    on_gpus = read(("train.sh", f"{launcher} {COMMAND}\n"), ("ds.json", ZERO_3))  # where they change nothing
    assert on_gpus.scenario.config.host_threads is None
    assert not any("OMP_NUM_THREADS" in note for note in on_gpus.notes)
