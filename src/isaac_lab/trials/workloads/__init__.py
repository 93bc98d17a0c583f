"""The workloads that there are; importing this fills the registry."""

from isaac_lab.trials.workloads import glue, gpt, mlp, resnet

__all__ = ["glue", "gpt", "mlp", "resnet"]
