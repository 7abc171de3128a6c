from verifiers import Words as load_environment

__all__ = ["load_environment"]
