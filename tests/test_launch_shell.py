"""Launch scripts as bash reads them: what ends a command, what is followed, and what is said of the rest."""

from __future__ import annotations

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files.launch import launchers, shell
from clustersim.files.launch.files import document, documents

COMMAND = "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --use-flag"
WORDS = COMMAND.split()


def words(text):
    return shell.script(text, "x.sh").command


@pytest.mark.parametrize(
    "text",
    [
        f"{COMMAND} 2>&1 | tee log.txt",
        f"{COMMAND} |& tee -a log.txt",
        f"{COMMAND} &> log.txt",
        f"{COMMAND} &>> log.txt &",
        f"{COMMAND} > out.log 2> err.log &",
        f"{COMMAND} >>out.log 2>&1 </dev/null & wait",
        f"{COMMAND} > >(tee out) 2> >(tee err >&2)",
        f"{COMMAND}; echo done --with this",
        f"{COMMAND} && echo done || exit 1",
        f"mkdir -p logs && {COMMAND}",
        f"cd /x || exit 1\n{COMMAND}",
        f"{COMMAND} \\",
        f"{COMMAND} \\\n",
        f"{COMMAND} # and --not-this",
        f"if ! {COMMAND}; then echo failed --code 3; fi",
        f"{{ {COMMAND}; }} 2>&1 | tee log",
        f"( {COMMAND} ) > log",
        f"time {COMMAND}\r\n",
        f"set -euo pipefail; {COMMAND}",
        f'cmd="{COMMAND} 2>&1 | tee log"\necho $cmd\neval $cmd',
        f"CMD='{COMMAND}'\neval \"$CMD\" > log 2>&1",
        f"run() {{\n  {COMMAND}\n}}\nrun 2>&1 | tee log",
        f"function run {{ {COMMAND}; }}\nrun",
        f"{COMMAND} 1>log",
        "A=(--num-layers 32 # layers\n --hidden-size 4096\n)\ntorchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py "
        '"${A[@]}" --use-flag 2>&1 | tee log',
        "N=2\ntorchrun --nproc_per_node ${G:-8} --nnodes $((N*1)) pretrain_gpt.py --num-layers $(expr 4 \\* 8) "
        "--hidden-size `echo 4096` --use-flag > log",
        COMMAND.replace("torchrun", "$(which torchrun)"),
        "RUN=`command -v torchrun`\n" + COMMAND.replace("torchrun", "$RUN"),
        "case 7b in\n 7b|8b) L=32 ;;\n *) L=9;;\nesac\n" + COMMAND.replace("32", "$L"),
        "for f in a b; do L=32; done; " + COMMAND.replace("32", "${L}"),
        "X=model.sh.32\n" + COMMAND.replace("32", "${X##*.}"),
        'bash -c "' + COMMAND + ' 2>&1 | tee log"',
        "L=32\nsh -lc '" + COMMAND.replace("32", "$L") + "'",
        f"while true; do\n  {COMMAND} && break\n  sleep 60\ndone",
        f"for try in $(seq 3); do {COMMAND} && break; done",
        f"cat > job.sh <<'EOT'\n#!/bin/bash\n{COMMAND}\nEOT\nbash job.sh",
    ],
)
def test_what_follows_a_command_is_no_part_of_its_last_option(text):
    assert words(text) == WORDS


def test_nohup_and_wrappers_stay_in_front_of_the_launcher():
    assert words(f"nohup {COMMAND} > out.log 2>&1 &") == ["nohup", *WORDS]
    read = document(f"export A=1\nnohup {COMMAND} > out.log 2>&1 &", "x.sh")
    assert read.machine["cluster.nodes"].value == "2"
    assert read.options["args", "use_flag"].value == []


@pytest.mark.parametrize(
    ("text", "nodes", "each", "world"),
    [
        ("#SBATCH -N 4\n#SBATCH --gres=gpu:8\nsrun python train.py --a", "4", "8", None),
        ("#SBATCH --nodes=4 # four\n#SBATCH --ntasks-per-node=8\nsrun python -u train.py --a", "4", "8", None),
        (
            "#SBATCH -N4\n#SBATCH --gpus-per-node=h100:8\nsrun torchrun --nproc_per_node $SLURM_GPUS_ON_NODE t.py --a",
            "1",
            "8",
            None,
        ),
        ("#SBATCH --nodes 4\ntorchrun --nnodes ${SLURM_NNODES:-1} --nproc-per-node=8 t.py --a", "4", "8", None),
        ("#SBATCH -n 32\nsrun python t.py --a", None, None, "32"),
        (
            "#SBATCH --nodes=4\n##SBATCH --nodes=9\ntorchrun --nnodes $SLURM_JOB_NUM_NODES --nproc_per_node 8 t.py --a",
            "4",
            "8",
            None,
        ),
        ("srun -N 4 --ntasks-per-node=8 python t.py --a", "4", "8", None),
        ("srun -N 4 bash -c 'torchrun --nproc_per_node 8 --nnodes 4 t.py --a'", "4", "8", None),
        ("mpirun -np 32 -N 8 -x A=b python t.py --a", None, "8", "32"),
        ("mpirun -H a:8,b:8 -np 16 python t.py --a", "2", None, "16"),
        ("mpirun --map-by ppr:8:node -np 32 python t.py --a", None, "8", "32"),
        ("deepspeed --num_gpus=8 --num_nodes 2 t.py --a", "2", "8", None),
        ("deepspeed --include localhost:0,1,2,3 t.py --a", "1", "4", None),
        ("deepspeed --module pkg.train --a", None, None, None),
        ("python -m torch.distributed.launch --nproc_per_node=8 --nnodes=2 t.py --a", "2", "8", None),
        ("python3 -u -m torch.distributed.run --nproc-per-node 8 --nnodes 2 -m pkg.train --a", "2", "8", None),
        ("accelerate launch --num_machines 2 --num_processes 16 t.py --a", "2", None, "16"),
        ("torchrun --nproc_per_node 8 t.py --a", "1", "8", None),
        ("torchrun $ARGS t.py --a", None, None, None),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 python t.py --a", None, "4", None),
        ("A=(--nnodes 2)\nA+=(--nproc_per_node 8)\ntorchrun ${A[@]} t.py --a", "2", "8", None),
    ],
)
def test_every_launcher_says_of_the_machine_what_it_starts(text, nodes, each, world):
    read = document(text, "x.sh")
    found = {name: option.value for name, option in read.machine.items()}
    assert found == {
        name: value
        for name, value in (("cluster.nodes", nodes), ("cluster.gpus_per_node", each), ("cluster.world", world))
        if value is not None
    }
    assert ("args", "a") in read.options


def test_the_launcher_counts_and_not_what_the_scheduler_was_asked_for():
    read = document("#SBATCH --nodes=4\ntorchrun --nnodes 2 --nproc_per_node 8 t.py --a", "x.sh")
    assert read.machine["cluster.nodes"].value == "2"
    assert any("--nnodes 2 counts, not --nodes 4" in note for note in read.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source env.sh\n{}", "line 1 reads env.sh, which was not given"),
        (". ./conf/env.sh && {}", "reads ./conf/env.sh, which was not given"),
        ("while read x; do A=1; done\n{}", "begins a loop, which is not followed"),
        ("for lr in 1 2; do torchrun t.py --lr $lr --n 3; done", "its first pass is read"),
        ("torchrun \\\n t.py --a 1 \\\n # --b 2 \\\n --c 3", "begins with an option"),
        ("[[ -f x ]] && A=3\n{}", "does not say"),
        ("case $1 in a) A=1;; esac\n{}", "chooses by what the script does not say"),
        ("torchrun a.py --n 1\ntorchrun b.py --n 1 --m 2", "there are more commands that start ranks"),
    ],
)
def test_what_is_not_followed_is_said(text, said):
    assert any(said in note for note in shell.script(text.format(COMMAND), "x.sh").notes)


def test_a_script_beside_is_followed_and_one_that_is_missing_is_asked_for(tmp_path):
    (tmp_path / "env.sh").write_text("export L=32\nG=8\n")
    (tmp_path / "run.sh").write_text("source ./env.sh\ntorchrun --nproc_per_node $G t.py --num-layers $L\n")
    (tmp_path / "submit.sh").write_text("#SBATCH -N 4\nsrun bash run.sh\n")
    read = documents([tmp_path / name for name in ("submit.sh", "run.sh", "env.sh")])
    assert [one.name for one in read] == [str(tmp_path / "submit.sh")]
    assert read[0].options["args", "num_layers"].value == "32"
    assert read[0].machine["cluster.gpus_per_node"].value == "8"
    with pytest.raises(ScenarioError, match=r"runs or reads run\.sh, which was not given; give that file too"):
        documents([tmp_path / "submit.sh"])


def test_a_configuration_that_a_script_writes_itself_is_read(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "STAGE=2\ncat <<EOT > $PWD/ds.json\n"
        '{"zero_optimization": {"stage": $STAGE}, "train_micro_batch_size_per_gpu": 4}\nEOT\n'
        "deepspeed t.py --deepspeed --deepspeed_config ds.json --num-layers 4\n"
    )
    found = documents([path])
    assert [one.name for one in found] == [str(path), "ds.json"]
    assert found[1].options["config", "zero_optimization.stage"].value == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A='x\n" + COMMAND, "ends within a quote"),
        ("A=(--a\n" + COMMAND, "ends within a quote, a list"),
        ("if true; then " + COMMAND, "the script ends where 'fi' should"),
        ("for i in 1 2; do " + COMMAND, "'done' should"),
        ("f() { f; }\nf\n" + COMMAND, "more than 20 deep"),
        (
            "for a in 1 2 3 4 5 6 7 8 9; do for b in 1 2 3 4 5 6 7 8 9; do for c in 1 2 3 4 5 6 7 8 9; do "
            "for d in 1 2 3 4 5 6 7 8 9; do A=1; B=2; C=3; done; done; done; done\n" + COMMAND,
            "more than 20,000 commands",
        ),
        ("echo hi --there", "holds no command with options"),
        ("A=" + "$((" * 500 + "\n" + COMMAND, "ends within a quote"),
    ],
)
def test_a_script_that_does_not_end_or_goes_on_for_ever_is_one_line(text, said):
    with pytest.raises(ScenarioError, match=said) as wrong:
        shell.script(text, "x.sh")
    assert "\n" not in str(wrong.value)


def test_changes_on_the_command_line_count_against_the_file():
    read = document("torchrun -m torchtitan.train --job.config_file a.toml --training.local_batch_size 2", "x.sh")
    assert read.overrides["config", "training.local_batch_size"].value == "2"
    read = document("python pretrain.py --config-name gpt trainer.devices=4 ++model.micro_batch_size=2", "x.sh")
    assert read.overrides["config", "trainer.devices"].value == "4"
    assert read.overrides["config", "model.micro_batch_size"].value == "2"


@pytest.mark.parametrize(
    "text",
    [
        f"cat > job.sbatch <<'EOT'\n#SBATCH --gres=gpu:8\n{COMMAND}\nEOT\nsbatch job.sbatch",
        f'sbatch --nodes=2 --wrap="{COMMAND}"',
        f'sbatch --nodes=2 --wrap "{COMMAND}"',
        COMMAND.replace("--nnodes 2", "--nnodes=2:2"),
    ],
)
def test_what_a_batch_job_runs_is_followed_and_equal_bounds_are_a_number(text):
    made = document(text, "x.sh")
    assert made.program == "pretrain_gpt.py"
    assert made.machine["cluster.nodes"].value == "2"
    assert made.options["args", "num_layers"].value == "32"


@pytest.mark.parametrize(
    "text",
    [
        "sbatch --nodes=4 job.sbatch",
        "sbatch -N 4 job.sbatch",
        f"sbatch --nodes 4 <<EOT\n#SBATCH --nodes=2\n{COMMAND}\nEOT",
    ],
)
def test_what_sbatch_is_given_counts_against_the_lines_of_the_script(text):
    read = shell.script(text, "x.sh", {"job.sbatch": f"#SBATCH --nodes=2\n{COMMAND}\n"})
    launch = launchers.taken(read.command, read.directives, read.variables)
    assert launch.tools[0][1]["nodes"] == "4"


def test_a_file_is_made_of_a_template_by_words_alone():
    line = 'sed "s/SIZE/64/g" t.json | sed "s/STAGE/1/" > made.json\n'
    text = '{"a": SIZE, "b": SIZE, "c": STAGE}\n{"c": STAGE}'
    read = shell.script(line + COMMAND, "x.sh", {"t.json": text})
    assert read.written == {"made.json": '{"a": 64, "b": 64, "c": 1}\n{"c": 1}'}
    assert read.read == {"t.json"}
    for other in (line.replace("SIZE", "[S]IZE"), line.replace("t.json", "-n t.json")):
        assert shell.script(other + COMMAND, "x.sh", {"t.json": text}).written == {}
    (note,) = shell.script(line + COMMAND, "x.sh").notes
    assert "makes a file of t.json, which was not given" in note


def test_a_text_that_only_grows_is_an_error():
    line = f"sed s/A/{'A' * 1000}/g t.json" + " | sed s/A/AA/g" * 20
    with pytest.raises(ScenarioError, match="makes a text of more than 1,000,000 characters"):
        shell.script(f"{line} > made.json\n{COMMAND}", "x.sh", {"t.json": "A"})
    with pytest.raises(ScenarioError, match="makes a text of more than"):
        shell.script(f"sed s/A/{'AA' * 900}/g t.json | sed s/A/{'AA' * 900}/g\n{COMMAND}", "x.sh", {"t.json": "A A"})


# ---- what functions of the script print ----------------------------------------------------------------------------


def layers(function, call="$(f)"):
    """Words behind ``--num-layers`` where a function is called in their place."""
    made = shell.script(f"A=3\n{function}\n{COMMAND.replace('32', call)}\n", "x.sh")
    return made.command[made.command.index("--num-layers") + 1]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("f() { echo 32; }", "$(f)"),
        ("f() { echo 32; }", "`f`"),
        ("f() { echo 32; }", '"$(f)"'),
        ("function f {\n  local half=16\n  echo $((half * 2))\n}", "$(f)"),
        ("f() { local n=$1; if [ $n = big ]; then n=32; fi; echo $n; }", "$(f big)"),
        ("f() { if [[ $1 -gt 4 ]]; then echo 32; return; fi\n  echo 2; }", "$(f 8)"),
        ("f() { case $1 in\n 7b|8b) echo 32;;\n *) echo 4;;\n esac; }", "$(f 7b)"),
        ("g() { echo 30; }\nf() { echo $(($(g) + 2)); }", "$(f a b)"),
        ("f() { A=32; echo $A; }\nB=$(f)", "$B"),
        ("B=2", "$(( $(echo 16) * B ))"),
        ("B=2", "$((`echo 15`*B + $((B * 1))))"),
        ("f() { echo 3,2; }", "$(f | tr , 0 | bc)0"),
    ],
)
def test_what_a_function_prints_is_what_stands_in_its_place(function, call):
    wanted = "3020" if "bc" in call else "32"
    assert layers(function, call).replace("${command}", "?") == wanted


def test_what_a_function_sets_behind_a_substitution_stays_there():
    assert layers("f() { A=5; echo 1; }\nB=$(f)", "$A") == "3"


@pytest.mark.parametrize(
    "function",
    [
        "f() { echo $(f); }",
        "g() { echo $(f); }\nf() { echo $(g); }",
        "f() { nvidia-smi -L | wc -l; }",
        "f() { hostname; }",
        "f() {\n cat <<EOT\n32\nEOT\n}",
        "f() { local -a n=(1 2); echo ${n[0]}; }",
        "f() { for i in 1 2; do echo $i; done; }",
    ],
)
def test_what_a_function_prints_that_only_running_tells_is_not_guessed(function):
    assert layers(function) == "${command}"


@pytest.mark.parametrize(
    "line",
    [
        "tmux new-session -d -s a '{}'",
        "tmux send-keys -t a '{}' Enter",
        "script -q -c '{}' log",
        "ssh node1 '{}'",
        "screen -dmS a {}",
    ],
)
def test_a_line_that_another_terminal_runs_is_the_command(line):
    launch = "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 4"
    assert words(line.format(launch))[-5:] == launch.split()[-5:]


def test_horovod_starts_ranks_as_mpirun_does():
    taken = launchers.taken(["horovodrun", "-np", "16", "-H", "a:8,b:8", "python", "train.py"], [], {})
    assert taken.machine["world"][1] == "16"
    assert taken.machine["nodes"][1] == "2"
