"""The text of one completion while it grows, as an iterator."""

from jaxkv.engine import Engine
from jaxkv.errors import EngineError
from jaxkv.outputs import OutputBuilder
from jaxkv.request import RequestOutput


class TextStream:
    """Yields pieces of text; each `next` runs the engine until there is one.

    Closing the stream, leaving its `with` block or dropping the last reference cancels the request.

    Raises:
        EngineError: the engine could not go on with the request.
    """

    def __init__(self, engine: Engine, builder: OutputBuilder) -> None:
        self._engine = engine
        self._builder = builder
        self._is_closed = False

    @property
    def output(self) -> RequestOutput | None:
        """The complete output, once the request has ended."""
        return self._builder.output

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> str:
        while not self._is_closed:
            if piece := self._builder.take_text():
                return piece
            if (output := self._builder.output) is not None:
                self._is_closed = True
                if output.outputs[0].error:
                    raise EngineError(output.outputs[0].error)
                break
            self._engine.step()
        raise StopIteration

    def close(self) -> None:
        """Cancels the request if it still runs; its pages are free at once."""
        self._is_closed = True
        if self._builder.output is None:
            self._engine.abort(self._builder.request.request_id)

    def __enter__(self) -> "TextStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
