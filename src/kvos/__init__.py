"""kvos: the memory manager that an LLM agent's context runs on."""

__version__ = "0.1.0"
