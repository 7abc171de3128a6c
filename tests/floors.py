"""The floors of the package: a folder imports only from lower floors."""

FLOORS = (
    ("plain data, settings, files, formulas", {"types", "config", "diagnostics", "files", "objective", "weights"}),
    ("models, packed rollouts, child processes", {"model", "packing", "processes"}),
    (
        "the parts: what samples, what trains, what carries, what judges, what is kept, what is measured",
        {"distributed", "engine", "metrics", "rewards", "storage", "trainer"},
    ),
    (
        "what is made of parts: tasks, the orchestrator, the trial of a model",
        {"behavior", "envs", "orchestrator"},
    ),
    ("the wiring: the life of each rank; models to try it with", {"demo", "ranks"}),
    ("what the command line can do", {"commands"}),
    ("the command line", {"cli"}),
    ("the entry", {"__main__"}),
)
