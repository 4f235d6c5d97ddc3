"""What a command is asked: a field of a spec is an option, a key of a config file and a recorded setting."""

from vitgraph.specs.asked import (
    BenchSpec,
    CalibrateSpec,
    CompareSpec,
    PlanSpec,
    ProfileSpec,
    TuneSpec,
    VerifySpec,
)
from vitgraph.specs.parts import (
    BASELINES,
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    EAGER_BASELINE,
    HF_BASELINE,
    MONOLITHIC_BASELINE,
    GraphSpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
    ShellSpec,
    TrafficSpec,
    WorkloadSpec,
)
from vitgraph.specs.tools import WorkloadCallsSpec, WorkloadConvertSpec, WorkloadInspectSpec, WorkloadMakeSpec

__all__ = [
    "BASELINES",
    "DEFAULT_MAX_MODEL_LEN",
    "DEFAULT_MAX_NUM_BATCHED_TOKENS",
    "EAGER_BASELINE",
    "HF_BASELINE",
    "MONOLITHIC_BASELINE",
    "BenchSpec",
    "CalibrateSpec",
    "CompareSpec",
    "GraphSpec",
    "ModelSpec",
    "ParallelSpec",
    "PlanSpec",
    "ProfileSpec",
    "RunSpec",
    "ShellSpec",
    "TrafficSpec",
    "TuneSpec",
    "VerifySpec",
    "WorkloadCallsSpec",
    "WorkloadConvertSpec",
    "WorkloadInspectSpec",
    "WorkloadMakeSpec",
    "WorkloadSpec",
]
