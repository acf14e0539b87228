"""The type of a trainer's settings as keyword arguments.

Type checkers and editors read arguments.pyi instead, which `make reference` writes from `TrainerSettings`.
"""

TrainerArguments = dict
