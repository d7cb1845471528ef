"""The bash that runs at sites, and reading its answers."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from launch.remote import SCRIPTS, Part, parse, script
from tests.launch.launch_cases import ROOT
from tests.launch.remote_cases import part

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"))
LINES = st.lists(st.one_of(st.sampled_from(["@ end 0", "@ end", " @ end 1", "@ x", "  @ ", "@"]), TEXT), max_size=4)
PRELUDE = (SCRIPTS / "prelude.sh").read_text()


def bash(text: str, *arguments: str) -> str:
    command = ["bash", "-c", text, "bash", *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()


def test_scripts_pass_shellcheck():
    program = str(SHELLCHECK) if SHELLCHECK.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed")
    files = sorted(map(str, SCRIPTS.glob("*.sh")))
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert files and done.returncode == 0, done.stdout


def test_every_script_is_sent():
    sent = {"prelude", "setup"}  # which others read
    for path in (ROOT / "launch").rglob("*.py"):
        for words in re.findall(r"\bscript\(\s*\*?\(?((?:\"\w+\"[,)]?\s*)+)", path.read_text()):
            sent |= set(re.findall(r"\w+", words))
    assert sent == {path.stem for path in SCRIPTS.glob("*.sh")}


def test_scripts_do_not_stand_in_the_allocation_of_their_launcher():
    allocation = "export SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_GPUS_PER_NODE=8 SLURM_CONF=/etc/s SBATCH_ACCOUNT=us\n"
    shown = "\nenv | grep -E '^(SLURM|SBATCH)_' | sort"
    own = "\nSBATCH_ACCOUNT=us\nSLURM_CONF=/etc/s\nSLURM_TIME_FORMAT=standard\n"
    assert bash(f"{allocation}{PRELUDE}{shown}") == own
    assert "SLURM_NTASKS=4" in bash(f"{allocation}unset SLURM_JOB_ID\n{PRELUDE}{shown}")


def test_what_a_start_up_exports_is_no_option_of_what_is_asked_but_whom_jobs_are_charged_to():
    exported = "".join(
        f"export {name}=other\n"
        for name in (*("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_ACCOUNT", "SBATCH_QOS"), "SQUEUE_PARTITION")
    )
    shown = "\nown_options <<<'#SBATCH --qos=normal'\nenv | grep -E '^(SBATCH|SQUEUE)_' | sort"
    assert bash(f"{exported}{PRELUDE}{shown}") == "\nSBATCH_ACCOUNT=other\n"


def test_a_greeting_that_leaves_its_line_open_takes_no_part_along():
    assert parse(bash(f"printf welcome\n{PRELUDE}\npart a echo x")) == {"a": Part("x\n", 0)}


def test_a_line_that_fails_ends_the_shell(tmp_path):
    known = 'module() { [ "$2" = gcc ]; }\n'
    (tmp_path / "activate").write_text('echo "$# arguments"; here=on\n')
    lines = shlex.join(["module load gcc", f". {tmp_path}/activate"])
    assert bash(f'{known} . {SCRIPTS}/setup.sh {lines}; echo "$here"') == "0 arguments\non\n"
    command = ["bash", "-c", f"{known} . {SCRIPTS}/setup.sh 'module load gcc' 'module load cuda/9' 'echo off'; echo on"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: module load cuda/9 failed on ")


@given(TEXT, st.lists(TEXT, max_size=3))
def test_whatever_a_script_is_given_arrives(word, words):
    shown = '\nprintf "%s\\0" "$directory" "${files[@]}"'
    text = script("write_files", directory=word, files=words).partition("# shellcheck")[0]
    assert bash(text + shown).split("\0")[:-1] == [word, *words]


@given(st.dictionaries(TEXT.filter(bool), st.integers(0, 99), max_size=3))
def test_counts_arrive_by_their_names(known):
    sizes = {"ask_seconds": 1, "chunk_bytes": 1, "look_bytes": 1}
    given_to = {"directory": "", "keys": "", "at": (), "files": (), "whole": (), "logs": "", **sizes}
    text = script("jobs", "poll", **given_to, known=known).partition("# shellcheck")[0]
    words = bash(f'{text}\nfor name in "${{!known[@]}}"; do printf "%s\\0" "$name" "${{known[$name]}}"; done').split(
        "\0"
    )
    assert dict(zip(words[:-1:2], map(int, words[1::2]), strict=True)) == known


def test_a_script_is_given_what_it_declares():
    with pytest.raises(TypeError, match=r"write_files.sh: declares \['directory', 'files'\], is given \['directory'\]"):
        script("write_files", directory="/scratch")


@given(LINES, st.integers(0, 255))
def test_what_a_command_prints_and_its_exit_code_come_back(lines, code):
    said = "".join(f"{line}\n" for line in lines)
    answer = bash(f'{PRELUDE}\nsay() {{ printf %s "$1"; return {code}; }}\necho hello\npart "a b" say "$1"\ntrue', said)
    assert parse(answer) == {"a b": Part(said, code)}


def test_a_last_line_without_an_end_gets_one():
    assert parse(bash(f"{PRELUDE}\npart a printf 'x y'")) == {"a": Part("x y\n", 0)}


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    parse(text)


@given(st.data())
def test_a_part_that_was_cut_off_is_known_by_it(data):
    whole = "".join(part(str(number), "1\n", number) for number in range(3))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for name, found in parse(cut).items():
        assert found in (Part(), parse(whole)[name])
    assert parse(cut) != parse(whole)
