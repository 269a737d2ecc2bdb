"""1 for the right sum, less for a number that is further off."""

from collections.abc import Mapping


def near(completion: str, prompt: str, fields: Mapping[str, str]) -> float:
    said = completion.strip()
    return 1 / (1 + abs(int(said) - int(fields["answer"]))) if said.isdecimal() else 0.0
