"""What must be alike on all ranks, and the comparison: settings, environment, versions, code, files by their content.

The cheap before the dear: `compare_programs` needs the config alone; `compare_files` digests what is small on every
rank and has each large file (weights, data) read by one: what several ranks see as one file (same machine, device,
inode, size and time) is read by the first of them.  Both raise the same ValueError on all ranks.
"""

from __future__ import annotations

import importlib.metadata
import json
import locale
import os
import pkgutil
import platform
import site
import socket
import stat
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import spmd_rl
from spmd_rl.config import Config
from spmd_rl.diagnostics.user_code import refused
from spmd_rl.distributed.agreement import Facts, Party, Said, agree, difference
from spmd_rl.files.fingerprint import digests_of, file_digest
from spmd_rl.files.model_files import INDEX, weight_files

WORD_S = 120.0  # for all ranks to say what they were started with, once they have met

MAY_DIFFER = ("model.path",)  # a local path: its content is compared; so is that of files that env.*.args name

# Variables that change what is computed.  OMP_NUM_THREADS and NCCL's are not among them: nodes may differ in cores and
# links, and what these change is the order of sums, as any other batch does.
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONUTF8", "MKL_CBWR")
# fmt: off
PREFIXES = (
    "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "CUBLAS", "CUDNN_", "ATEN_", "ONEDNN_", "DNNL_", "TRITON_",
    "VLLM_", "FLASH_ATTENTION_", "FLASHINFER_",
)
OF_A_NODE = (  # beginnings of names that say where things lie or how they are logged
    "TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_ELASTIC_", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS",
    "TORCH_TRACE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_SHOW_", "TORCH_CPP_LOG_LEVEL", "TORCH_CUDA_ARCH_LIST",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_KERNEL_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR",
    "CUBLAS_LOG", "CUBLASLT_LOG", "CUDNN_LOG", "ONEDNN_VERBOSE", "DNNL_VERBOSE", "TRITON_CACHE_DIR", "TRITON_HOME",
    "VLLM_HOST_IP", "VLLM_PORT", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE", "VLLM_LOGGING_",
    "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_USAGE_", "VLLM_RPC_", "FLASHINFER_WORKSPACE",
    "FLASHINFER_CACHE",
)
# fmt: on
PACKAGES = ("spmd_rl", "torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2")  # of all ranks
BESIDE_EPISODES = ("vllm", "math-verify", "pyarrow", "reasoning-gym", "verifiers")  # of inference ranks

MODEL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # all that is read beside the weights
NO_MODEL_FILES = (INDEX, "LICENSE", "NOTICE", "README", "USE_POLICY")  # beginnings of names
UNREAD_KEYS = ("_name_or_path", "transformers_version")  # of config.json
MOST_FILES = 10_000  # in a folder that an argument names: more are not compared


@dataclass(frozen=True, kw_only=True)
class Source:
    """A large file that a rank reads."""

    name: str  # what it is called in a message; weights are called by tensor
    path: Path
    weights: bool

    def seen_as(self) -> list[Any]:
        """Equal where two ranks read one file: until a machine starts again each of its devices has one number."""
        status = self.path.stat()
        return [_machine(), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def compare_programs(party: Party, config: Config | ValueError) -> None:
    """What each rank was started with; a rank that has no config gives the reason instead."""

    def say() -> dict[str, Any]:
        if isinstance(config, ValueError):
            raise config
        return asdict(of_program(config, plays=config.split.role(party.rank) == "inference"))

    agree(party, "programs", say, _refuse_difference, timeout_s=WORD_S)


def compare_files(
    party: Party, config: Config, *, role: str, devices: Mapping[str, str], timeout_s: float
) -> list[str]:
    """What each rank reads; lines that say what was compared, and what could not be."""
    leads, plays = party.rank == 0, role == "inference"
    found: list[Source] = []
    told: list[Said] = []

    def say() -> dict[str, Any]:
        found.extend(sources(config, loads=leads or role == "trainer"))
        facts = of_files(config, leads=leads, plays=plays, devices=devices)
        return {**asdict(facts), "sources": [[one.name, one.weights, one.seen_as()] for one in found]}

    def decide(said: Sequence[Said]) -> list[list[int]]:
        _refuse_difference(said)
        told.extend(replace(one, value=one.value["sources"]) for one in said)
        return who_reads([[seen for _, _, seen in one.value] for one in told])

    def decide_contents(read: Sequence[Said]) -> dict[str, int]:
        if line := different_contents(told, read):
            raise ValueError(line)
        seen = [one.value[number][2] for one, numbers in zip(told, asked, strict=True) for number in numbers]
        return {"bytes": sum(num_bytes for *_, num_bytes, _ in seen)}

    began = time.monotonic()
    asked = agree(party, "files", say, decide, timeout_s=timeout_s)
    counted = agree(party, "contents", lambda: digests(found, asked[party.rank]), decide_contents, timeout_s=timeout_s)
    read_s = time.monotonic() - began
    lines = [f"compared on all ranks: {counted['bytes'] / 1e9:.3g} GB of weights and data, read in {read_s:.1f} s"]
    return lines + [
        f"warning: {name} = {value!r} has more than {MOST_FILES} files: they are not compared between ranks"
        for name, value in _texts(config)
        if _is_path(value) and len(_files(Path(value))) > MOST_FILES
    ]


def _refuse_difference(said: Sequence[Said]) -> None:
    facts = [Facts(of_all=one.value["of_all"], of_some=one.value["of_some"]) for one in said]
    if line := difference(list(zip(said, facts, strict=True))):
        raise ValueError(f"{line}: all ranks must have the same")


def of_program(config: Config, *, plays: bool) -> Facts:
    """Settings, variables, versions and this package's code.  `plays`: episodes run on this rank."""
    of_all = dict(_settings(config))
    of_all |= {f"environment variable {name}": os.environ[name] for name in sorted(os.environ) if _counts(name)}
    of_all |= {"version of Python": platform.python_version()}
    of_all |= {f"version of {name}": _version(name) for name in PACKAGES}
    of_all |= {"encoding of text files": locale.getpreferredencoding(False)}
    package = Path(spmd_rl.__file__).parent
    of_all |= {f"code spmd_rl/{p.relative_to(package)}": file_digest(p) for p in sorted(package.rglob("*.py"))}
    return Facts(of_all=of_all, of_some={f"version of {name}": _version(name) for name in BESIDE_EPISODES if plays})


def of_files(config: Config, *, leads: bool, plays: bool, devices: Mapping[str, str]) -> Facts:
    """The model folder without its weights, users' code, and what arguments of environments are that name no file.

    Where an argument names a file here its content is compared instead (`sources`); on a rank where no episodes run a
    file may be missing.  `devices`: "cuda" by what this rank does with one, "engine" | "trainer".
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise ValueError(f"model.path = {config.model.path!r}: no such folder")
    of_some = {f"device of the {kind} ranks": device for kind, device in devices.items()}
    for name, value in _texts(config):
        if leads or not _is_path(value):
            of_some[f"setting {name}"] = json.dumps(value)
        if plays or _is_path(value):
            of_some[f"what setting {name} names"] = _what(Path(value)) if _is_path(value) else "no file or folder"
    if plays:
        for env in config.env.values():
            with refused(f"environment {env.path}"):
                pkgutil.resolve_name(env.path)
        of_some |= {f"code of module {name}": file_digest(file) for name, file in _users_modules()}
    return Facts(of_all=dict(_model_facts(folder)), of_some=of_some)


def sources(config: Config, *, loads: bool) -> list[Source]:
    """The large files that there are for this rank: those that arguments name, and, if it `loads` them, the weights."""
    named = []
    for name, value in _texts(config):
        files, where = _files(Path(value)) if _is_path(value) else {}, f"what setting {name} names"
        for inside, file in (files if len(files) <= MOST_FILES else {}).items():
            content = f"content of {inside} in {where}" if inside else f"content of {where}"
            named.append(Source(name=content, path=file, weights=False))
    weights = weight_files(Path(config.model.path)) if loads else []
    return named + [Source(name=file.name, path=file, weights=True) for file in weights]


def who_reads(seen: Sequence[Sequence[list[Any]]]) -> list[list[int]]:
    """[ranks][sources] how each rank sees its sources, to the numbers of those that it is to read: each file once."""
    taken: set[str] = set()
    asked: list[list[int]] = []
    for of_rank in seen:
        mine = {json.dumps(one): number for number, one in enumerate(of_rank)}
        asked.append([number for key, number in mine.items() if key not in taken])
        taken |= mine.keys()
    return asked


def digests(found: Sequence[Source], numbers: Iterable[int]) -> dict[str, Any]:
    """By number: of a file, or of each tensor in it."""
    return {
        str(number): digests_of(found[number].path) if found[number].weights else file_digest(found[number].path)
        for number in numbers
    }


def different_contents(told: Sequence[Said], read: Sequence[Said]) -> str:
    """As `difference`, of files and tensors; `told`: [[name, is weights, how it is seen], …], `read`: `digests`."""
    by_file = {
        json.dumps(one.value[int(number)][2]): digest
        for one, some in zip(told, read, strict=True)
        for number, digest in some.value.items()
    }
    files, tensors = [], []
    for one in told:
        digest_of = {name: by_file[json.dumps(file)] for name, _, file in one.value}
        weights = [digest_of[name] for name, is_weights, _ in one.value if is_weights]
        named = {name: digest_of[name] for name, is_weights, _ in one.value if not is_weights}
        files.append((one, Facts(of_all={}, of_some=named)))
        if weights:
            of_all = {f"tensor {key} in model.path": digest for some in weights for key, digest in some.items()}
            tensors.append((one, Facts(of_all=of_all, of_some={})))
    return difference(tensors) or difference(files)


def _settings(config: Config) -> Iterator[tuple[str, str]]:
    """All but MAY_DIFFER and the texts among arguments of environments."""
    for section in fields(config):
        value = getattr(config, section.name)
        tables = {f"env.{name}": env for name, env in value.items()} if section.name == "env" else {section.name: value}
        for table, settings in tables.items():
            for setting in fields(settings):
                name = f"{table}.{setting.name}"
                if name in MAY_DIFFER:
                    continue
                if section.name == "env" and setting.name == "args":
                    leaves = list(_leaves(name, settings.args))
                    yield f"setting {name}", ", ".join(key for key, _ in leaves)
                    others = ((key, value) for key, value in leaves if not isinstance(value, str))
                    yield from ((f"setting {key}", json.dumps(value, default=str)) for key, value in others)
                else:
                    yield f"setting {name}", json.dumps(getattr(settings, setting.name), default=str)


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    """Those among arguments of environments, which may name files."""
    for name, env in config.env.items():
        yield from ((key, value) for key, value in _leaves(f"env.{name}.args", env.args) if isinstance(value, str))


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(f"{name}.{key}", entry)
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from _leaves(f"{name}[{number}]", entry)
    else:
        yield name, value


def _is_path(text: str) -> bool:
    """It names a file or a folder on this machine."""
    try:
        kind = os.stat(text).st_mode if text else 0
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False
    return stat.S_ISREG(kind) or stat.S_ISDIR(kind)


def _files(path: Path) -> dict[str, Path]:
    """Those in a folder by their names below it, without hidden ones, hardly more than MOST_FILES; "" for a file."""
    if not path.is_dir():
        return {"": path}
    inside: dict[str, Path] = {}
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [Path(folder) / name for name in sorted(names) if not name.startswith(".")]
        inside |= {str(file.relative_to(path)): file for file in files if file.is_file()}
        if len(inside) > MOST_FILES:
            break
    return inside


def _what(path: Path) -> str:
    files = _files(path)
    if len(files) > MOST_FILES:
        return f"a folder of more than {MOST_FILES} files, which are not compared"
    return "a file" if path.is_file() else f"a folder of {len(files)} files: {', '.join(files)}"


def _model_facts(folder: Path) -> Iterator[tuple[str, str]]:
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    for file in sorted(files):
        name = str(file.relative_to(folder))
        if file.suffix not in MODEL_FILES or name.startswith((".", *NO_MODEL_FILES)) or not file.is_file():
            continue
        try:
            settings = json.loads(file.read_bytes()) if name in ("config.json", "generation_config.json") else None
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            yield f"{name} in model.path", file_digest(file)
            continue
        for key, value in settings.items():
            if key not in UNREAD_KEYS:
                yield f"{key} of {name} in model.path", json.dumps(value, sort_keys=True)


def _users_modules() -> Iterator[tuple[str, Path]]:
    """Those loaded from files that are neither of Python, nor of an installed package, nor of this one."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [sysconfig.get_path(name) for name in names] + site.getsitepackages() + [site.getusersitepackages()]
    installed.append(str(Path(spmd_rl.__file__).parent))
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        users = not file.startswith(tuple(f"{folder}{os.sep}" for folder in installed))
        if users and os.path.isabs(file) and os.path.isfile(file):
            yield name, Path(file)


def _counts(variable: str) -> bool:
    return variable in VARIABLES or (variable.startswith(PREFIXES) and not variable.startswith(OF_A_NODE))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
