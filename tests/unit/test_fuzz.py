"""Whatever a config file says: it is taken, or refused in one line before anything is built."""

import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmd_rl import cli, config
from spmd_rl.demo import tiny_model
from spmd_rl.ranks import program

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
SEEDS = [range(100), pytest.param(range(100, 600), marks=pytest.mark.full)]
VALUES = [
    "-1",
    "0",
    "1e300",
    "nan",
    "-inf",
    "true",
    '""',
    '"x"',
    "[]",
    "{}",
    "[1]",
    "9223372036854775808",
    "'a:b'",
    "1979-05-27",
]
WORDS = ["[run]", "[env]", "[[env.a]]", "a.b.c = 1", "steps = 1", "x", "=", '"', "[", "#", "\0", "\ufeff", "é"]


def mutate(text: str, rng: random.Random) -> str:
    """A few places changed: of the kind that hands make, and of the kind that disks make."""
    for _ in range(rng.randint(1, 3)):
        lines = text.split("\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(8):
            case 0:
                lines[i] = re.sub(r"=.*", lambda _: f"= {rng.choice(VALUES)}", lines[i])
            case 1:
                lines[i] = re.sub(r"^\w+", lambda name: name[0][: rng.randrange(len(name[0]))] + "s", lines[i])
            case 2:
                del lines[i]
            case 3:
                lines.insert(i, lines[j])
            case 4:
                lines[i], lines[j] = lines[j], lines[i]
            case 5:
                lines.insert(i, rng.choice(WORDS))
            case 6:
                at = rng.randrange(len(lines[i]) + 1)
                lines[i] = lines[i][:at] + chr(rng.randrange(1, 300)) + lines[i][at + rng.randrange(2) :]
            case 7:
                lines = lines[: i + 1]
        text = "\n".join(lines)
    return text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model.make(folder)
    return folder


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_damaged_config_is_taken_or_refused_in_a_line(tmp_path, monkeypatch, capsys, model, seeds):
    monkeypatch.chdir(tmp_path)
    path, taken = tmp_path / "config.toml", 0
    for seed in seeds:
        rng = random.Random(seed)
        path.write_bytes(mutate(rng.choice(CONFIGS).read_text(), rng).encode("utf-8", "surrogatepass"))
        code = cli.main(["check", str(path), f"model.path={model}"])
        refusal = capsys.readouterr().err
        if code == 0:
            refusal, taken = prepared(path, tmp_path / f"run{seed}", model), taken + 1
        assert code in (0, 2), seed
        assert code == 0 or re.fullmatch(r"error: [^\n]+\n", refusal), (seed, refusal)
        assert "\n" not in refusal.rstrip("\n"), (seed, refusal)
    assert 0.1 * len(seeds) < taken < 0.9 * len(seeds)  # the mutations are neither too mild nor too wild


def prepared(path: Path, run_dir: Path, model: Path) -> str:
    """What rank 0 says before anything is built, beyond the config itself: "" if nothing is wrong."""
    overrides = [f"run.dir={run_dir}", f"model.path={model}", "model.make="]
    try:
        cpu = torch.device("cpu")
        world = SimpleNamespace(restarted=False, device=cpu, engine_device=cpu, describe=lambda: "")
        program._prepare(world, config.load(path, overrides), "config")
    except (ValueError, OSError) as error:
        return str(error)
    return ""
