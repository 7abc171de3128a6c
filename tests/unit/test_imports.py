"""A file imports only from layers before its own, and no sibling; a folder counts as one file."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "spmd_rl"
LAYERS = [
    {
        "types",
        "user_code",
        "terminal",
        "policy",
        "ledger",
        "topology",
        "bounds",
        "virtual_time",
        "buffers",
        "folders",
        "tensor_file",
        "run_dir",
        "gguf",
        "model_files",
        "model_parts",
        "disk",
        "disk_watch",
        "guard",
        "confinement",
        "sandbox",
        "judged_program",
        "row_files",
    },
    {"text_part", "logit_form", "config", "packing", "advantages", "objective", "rewards", "tokenizer", "task_stream"}
    | {"attention", "logprobs", "workers", "data", "fingerprint", "math_reward", "code_reward"}
    | {"loop_watch"},
    {"judge", "model", "routes", "history", "continuation"},
    {"envs", "weights", "stored_names"},
    {"tiny_model", "smollm2"},
    {
        "world",
        "agreement",
        "transport",
        "checkpoint",
        "batch_log",
        "engine",
        "trainer",
        "liveness",
        "recorder",
        "plot",
    },
    {"rank_facts"},
    {"engine_thread", "engines", "episodes", "stop_signals", "behavior"},
    {"orchestrator", "simulate"},
    {"make_trainer", "probe_sampler"},
    {"inference", "member", "training", "resume", "replay", "tasks"},
    {"evaluate", "export"},
    {"orchestration"},
    {"train"},
    {"cli"},
    {"__main__"},
]
ALLOWED = {
    ("simulate", "orchestrator"),
    ("world", "topology"),
    ("sandbox", "confinement"),
    ("run_dir", "folders"),
    ("user_code", "terminal"),
    ("config", "topology"),
    ("smollm2", "gguf"),
    ("disk", "model_files"),
    ("fingerprint", "model_files"),
}
TORCH_FREE = ("orchestrator.orchestrator", "simulate", "config", "task_stream", "tokenizer", "envs.lookup", "packing")


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "spmd_rl":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
    return found


def test_every_arrow_points_to_an_earlier_layer() -> None:
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name in _imports(path) - {own}:
            if (own, name) not in ALLOWED and rank[name] >= rank[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_groups_are_made_in_one_place() -> None:
    """One made later would not meet: an engine's ranks count groups of their own."""
    makes = [path.name for path in PACKAGE.rglob("*.py") if "new_group(" in path.read_text()]
    assert makes == ["world.py"]


def test_only_the_wiring_imports_all_parts_of_the_orchestrator() -> None:
    parts = {path.stem for path in (PACKAGE / "orchestrator").glob("*.py")}
    for path in (PACKAGE / "orchestrator").glob("*.py"):
        if path.stem in ("orchestrator", "train_path", "state", "report", "eval_runner", "prober"):
            continue
        siblings = {name for name in parts if f"from spmd_rl.orchestrator.{name} " in path.read_text()}
        assert len(siblings) <= 1, f"{path.name} imports {siblings}"


def test_the_orchestrator_half_imports_no_torch() -> None:
    lines = "; ".join(f"import spmd_rl.{name}" for name in TORCH_FREE)
    subprocess.run([sys.executable, "-c", f"{lines}; import sys; assert 'torch' not in sys.modules"], check=True)
