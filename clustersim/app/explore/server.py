"""What answers the browser: one page, its changes, and a file to save. It listens on this machine alone.

Whoever has the address has the page, and it is nowhere but in the terminal: behind ``127.0.0.1`` and the port it has a
token that nobody can guess, the Host and Origin that a browser names must be that address (so that no other site's name
leads here), and what it may read is fenced in (:mod:`clustersim.app.explore.fence`).
"""

from __future__ import annotations

import json
import secrets
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from clustersim.app.explore.fence import files_of
from clustersim.app.explore.fields import KnobForm, form_of
from clustersim.app.explore.runs import PlayRequest, RunPlayer, told
from clustersim.app.explore.worker import RunWorker
from clustersim.app.plots.style import palette
from clustersim.app.report.pages import rendered
from clustersim.core.errors import ClusterSimError, needs
from clustersim.core.tomls import toml_text, toml_value
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import override

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

NEEDS = needs("explore", "explore")
LARGEST = 64 * 1024
"""Bytes of a form."""


def listening(port: int) -> socket.socket:
    """A socket of this machine alone; ``port`` 0 takes a free one. Raises :class:`ClusterSimError`."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()  # a browser that comes before the server is up waits
    except OSError as error:
        listener.close()
        raise ClusterSimError(f"port {port}: {error.strerror or error}; --port 0 takes a free one") from None
    return listener


def serve(name: str, schema: Mapping[str, Any], port: int, ready: Callable[[str], None]) -> None:
    """Serve a scenario until Ctrl-C; ``ready`` is given the address. Raises :class:`ClusterSimError`."""
    try:
        import uvicorn
    except ImportError:
        raise ClusterSimError(NEEDS) from None
    worker = RunWorker(name)

    class Server(uvicorn.Server):
        """Uvicorn's, whose end ends the worker as well."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """End the worker, then the server."""
            worker.close()  # what is played now has nobody to wait for it
            super().handle_exit(sig, frame)

    with listening(port) as door:
        token = secrets.token_urlsafe(24)
        host = f"127.0.0.1:{door.getsockname()[1]}"
        page = application(name, schema, token, host, worker)
        ready(f"http://{host}/{token}/")
        config = uvicorn.Config(page, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        Server(config).run([door])


def application(name: str, schema: Mapping[str, Any], token: str, host: str, worker: RunWorker) -> Starlette:
    """The application of the scenario called ``name``; ``host`` : what a browser must call it, with the port."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.routing import Route
    except ImportError:
        raise ClusterSimError(NEEDS) from None
    player = RunPlayer(name)
    desk = _Desk(name, player, form_of(player.opened, schema), worker)
    routes = [
        Route(f"/{token}/", desk.page),
        Route(f"/{token}/play", desk.play, methods=["POST"]),
        Route(f"/{token}/scenario.toml", desk.save),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Guard, token=token, host=host)])


@dataclass(frozen=True)
class _Guard:
    """Lets in who knows the token, by the right name."""

    app: Any
    token: str
    host: str

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        answer = self.app
        if scope["type"] != "lifespan":
            sent = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
            first = f"{scope['path']}/".split("/")[1]
            token_right = secrets.compare_digest(first.encode(), self.token.encode())
            ours = sent.get("host") == self.host and sent.get("origin", self.host).removeprefix("http://") == self.host
            if not (token_right and ours):
                answer = PlainTextResponse("forbidden: the address is the one that the terminal shows", 403)
        await answer(scope, receive, send)


@dataclass(frozen=True)
class _Desk:
    """The three things that can be asked."""

    name: str
    player: RunPlayer
    form: KnobForm
    worker: RunWorker

    async def page(self, request: Request) -> Response:
        """The page itself, which asks for the rest."""
        from starlette.responses import HTMLResponse

        nonce = secrets.token_urlsafe(16)
        name = self.player.opened.name
        sections = self.form.sections
        page = rendered("explore.html.j2", name=name, sections=sections, nonce=nonce, palette=palette)
        policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
        policy += "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return HTMLResponse(page, headers=headers)

    async def play(self, request: Request) -> Response:
        """A change and what is set beside it, ``{"now": {key: text}, "before": {key: text} or null}``, played."""
        from starlette.responses import JSONResponse

        try:
            request_body = json.loads(await _body(request))
            now = request_body["now"]
            before = request_body["before"]
            ask = PlayRequest(self.form.settings(now), None if before is None else self.form.settings(before))
            self.player.asked(ask.now)
        except ClusterSimError as error:
            return JSONResponse(asdict(told(str(error))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return JSONResponse({"error": "this is no change of a scenario"}, 400)
        reply = await self.worker(ask)
        if reply is None:
            return JSONResponse({"late": True})
        return JSONResponse(asdict(reply) | {"command": command(self.name, ask.now), "set": ask.now})

    async def save(self, request: Request) -> Response:
        """The scenario with the changes of the address, ``?set=KEY=VALUE&set=...``, as a file to keep."""
        from starlette.responses import PlainTextResponse

        try:
            text = saved(self.player.asked(tuple(request.query_params.getlist("set"))))
        except ClusterSimError as error:
            return PlainTextResponse(str(error), 400)
        headers = {"Content-Disposition": f'attachment; filename="{self.player.opened.name}.toml"'}
        return PlainTextResponse(text, media_type="application/toml", headers=headers)


async def _body(request: Request) -> bytes:
    """What was sent. Raises :class:`ValueError` for more than any form is."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise ValueError("too large")
    return body


def command(name: str, changes: Sequence[str]) -> str:
    """The command line that plays a scenario with these ``--set`` texts."""
    return shlex.join(["clustersim", "run", name, *(word for text in changes for word in ("--set", text))])


def saved(scenario: Scenario) -> str:
    """The scenario with its changes as TOML."""
    change_lines = (
        f"# {key}{' is gone' if value is None else f' = {toml_value(value)}'}"
        for key, value in scenario.changes.items()
    )
    head = [f"# {scenario.name}{', changed:' if scenario.changes else ''}", *change_lines]
    if any(str(name).endswith((".toml", ".json", ".csv")) for name in files_of(scenario).values()):
        head.append(f"# Its paths start in the folder of {scenario.path.name}.")
    return "\n".join(head) + "\n" + toml_text(override(scenario.table, scenario.changes))
