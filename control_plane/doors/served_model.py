"""What every door knows of the model behind it."""

from __future__ import annotations

from control_plane.text.model_text import ModelText
from service_chassis.errors import NotReady, UnknownModel, clip


class ServedModel:
    """The one model that this control plane serves."""

    def __init__(self, *, names: tuple[str, ...], source: str, text: ModelText | None) -> None:
        """Take what is known.

        Args:
            names: at least one; the first is preferred.
            source: what the user called it.
            text: None where it comes from the workers, see ``learn``.
        """
        self.names = names
        self.source = source
        self._text = text

    @property
    def text(self) -> ModelText:
        """Its text side. Raises ``NotReady`` until the workers have sent it."""
        if self._text is None:
            raise NotReady("not accepting requests: the model's tokenizer is with the workers, and not fetched yet")
        return self._text

    def learn(self, text: ModelText) -> None:
        """Take the text side that came from the workers."""
        self._text = text

    def close(self) -> None:
        """End what its text side has started."""
        if self._text is not None:
            self._text.client_templates.close()

    def check_name(self, name: str) -> None:
        """Raise ``UnknownModel`` unless ``name`` is unset or one of the served names."""
        if name and name not in self.names:
            served = ", ".join(repr(one) for one in self.names)
            raise UnknownModel(f"model={clip(repr(name), 120)}: is not served here; served: {served}")
