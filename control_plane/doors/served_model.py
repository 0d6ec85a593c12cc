"""What every door knows of the model behind it."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.text.model_text import ModelText
from service_chassis.errors import UnknownModel, clip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model that this control plane serves."""

    names: tuple[str, ...]  # at least one; the first is preferred
    source: str  # what the user called it
    text: ModelText

    def check_name(self, name: str) -> None:
        """Raise ``UnknownModel`` unless ``name`` is unset or one of the served names."""
        if name and name not in self.names:
            served = ", ".join(repr(one) for one in self.names)
            raise UnknownModel(f"model={clip(repr(name), 120)}: is not served here; served: {served}")
