"""The command line: which command, which config.  Imports no torch, so that help and mistakes are answered at once."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from spmd_rl import config as config_module
from spmd_rl.commands import shipped
from spmd_rl.config.topology import check_world_size
from spmd_rl.files import disk_space

READ_S = 1.0  # in which the ranks of a node have read the config
USAGE = """\
usage: torchrun --nproc-per-node=N -m spmd_rl CONFIG.toml [section.key=value ...] [--resume[=auto|must|never]]
       spmd_rl config [NAME]
       spmd_rl check CONFIG.toml [section.key=value ...]
       spmd_rl simulate CONFIG.toml [section.key=value ...] [options]
       spmd_rl eval CONFIG.toml [--model DIR] [--out FILE.json] [section.key=value ...]
       spmd_rl export RUN_DIR [--step N] [--dtype bfloat16|float32 | --adapter] DIR
       spmd_rl replay RUN_DIR --step N
       spmd_rl launch

Asynchronous RL post-training: the ranks of one torchrun job split into inference and trainer ranks.
`python -m spmd_rl` is the same command.

  config    print a shipped config, or list them all
  check     read the config, print it resolved with the staleness bound that it gives, try the model small, and stop
  eval      the config's evaluation on a model folder, in this process alone
  export    a run's checkpoint, the newest or that of --step, as a Hugging Face folder; --adapter: LoRA's part for PEFT
  replay    compute the loss of a logged batch again, in one process, and compare it with the logged one
  simulate  drive the real gate, dispatcher and sinks on a virtual clock: ages, idle shares, throughput
  launch    print the folder of the launch scripts: "$(spmd_rl launch)/cpu.sh" CONFIG.toml

Settings, as section.key, with their defaults:
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}; see spmd_rl --help")


def main(argv: Sequence[str]) -> int:
    """Run the command of `argv`; returns the exit code: 0, 2 for what the user wrote, 1 for a failed run."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE + config_module.describe())
        return 0 if argv else 2
    try:
        command = COMMANDS.get(argv[0])
        return command(argv[1:]) if command else _train(argv)
    except ValueError as error:
        return refuse(error)


def refuse(error: ValueError, wait_s: float = 30.0) -> int:
    """Say once on each node what is wrong with what the user wrote; the exit code of every rank.

    That is for the node's first rank to say: all of its ranks find the same.  When it has ended torchrun signals the
    others, which end with the same code; one that is not signalled found something of its own, and says it.
    """
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    told = threading.Event()
    if local_rank != "0":
        signal.signal(signal.SIGTERM, lambda *_: told.set())
    if local_rank == "0" or not told.wait(wait_s):
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    if local_rank == "0" and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        told.wait(min(wait_s, READ_S))
    return 2


def _read(prog: str, argv: Sequence[str]) -> tuple[config_module.Config, str]:
    """The config that the arguments name, with their overrides, and its name."""
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--resume", choices=("auto", "must", "never"))
    options = parser.parse_intermixed_args(["--resume=must" if word == "--resume" else word for word in argv])
    if options.config.suffix != ".toml":
        close = difflib.get_close_matches(str(options.config), COMMANDS, n=1)
        hint = f"did you mean the command {close[0]!r}?" if close else "a config is a .toml file"
        raise ValueError(f"{options.config}: {hint}")
    overrides = [*options.overrides, *([f"run.resume={options.resume}"] if options.resume else [])]
    return config_module.load(options.config, overrides), options.config.stem


def _train(argv: Sequence[str]) -> int:
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:  # of several nodes one may have another config, or none
        from spmd_rl.ranks.program import train

        try:
            train(*_read("spmd_rl", argv))
        except ValueError as error:
            train(error, "")
    config, name = _read("spmd_rl", argv)
    check_world_size(os.environ, config.split)

    from spmd_rl.ranks.program import train  # from here on torch is imported

    train(config, name)
    raise AssertionError("training ends the process")


def _check(argv: Sequence[str]) -> int:
    config, _ = _read("spmd_rl check", argv)
    print(config_module.dump(config))
    for line in config_module.limits(config):
        print(line)
    if needed := disk_space.needed_bytes(Path(config.model.path), **config.on_disk):
        print(f"disk: {needed / 1e9:.2f} GB for checkpoints, trained model and weights/, batches and metrics apart")
    for line in config_module.warnings(config):
        print(f"warning: {line}")
    config_module.check_model_folder(config)
    if Path(config.model.path).is_dir():
        from spmd_rl.model.tokenizer import try_tokenizer  # imports torch, which a config without a model does not need
        from spmd_rl.ranks.build_trainer import check_model

        print(f"model: {check_model(config).line}")
        try_tokenizer(config.model.path, config.model.template)
    return 0


def _config(argv: Sequence[str]) -> int:
    parser = _Parser(prog="spmd_rl config", add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="?")
    name = parser.parse_args(argv).name
    print("\n".join(shipped.list_configs()) if name is None else shipped.read_config(name).rstrip("\n"))
    return 0


def _launch(argv: Sequence[str]) -> int:
    _Parser(prog="spmd_rl launch", add_help=False, allow_abbrev=False).parse_args(argv)
    print(shipped.folder("launch"))
    return 0


def _simulate(argv: Sequence[str]) -> int:
    from spmd_rl.commands.simulate import main as simulate

    return simulate(argv)


def _eval(argv: Sequence[str]) -> int:
    parser = _Parser(prog="spmd_rl eval", add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path)
    options, rest = parser.parse_known_args(argv)
    config, _ = _read("spmd_rl eval", [*rest, *([f"model.path={options.model}"] if options.model else [])])

    from spmd_rl.commands.evaluate import evaluate

    return evaluate(config, options.out)


def _export(argv: Sequence[str]) -> int:
    parser = _Parser(prog="spmd_rl export", add_help=False, allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", type=int)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    form.add_argument("--adapter", action="store_true")
    options = parser.parse_intermixed_args(argv)

    from spmd_rl.commands.export import export

    return export(options.run, options.folder, options.step, options.dtype, adapter=options.adapter)


def _replay(argv: Sequence[str]) -> int:
    parser = _Parser(prog="spmd_rl replay", add_help=False, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, required=True)
    options = parser.parse_args(argv)

    from spmd_rl.commands.replay import replay

    return replay(options.run_dir, options.step)


COMMANDS = {
    "config": _config,
    "check": _check,
    "simulate": _simulate,
    "eval": _eval,
    "export": _export,
    "replay": _replay,
    "launch": _launch,
}
