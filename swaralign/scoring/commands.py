"""`swaralign scorer serve|check`, which `python -m swaralign.scoring` also offers."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from swaralign.scoring.plugins import REWARDS, AudioScorer, find_factory


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve a scorer until SIGTERM or Ctrl-C, and finish what is in flight."""
    from swaralign.scoring.server import ScorerServer, ServerSettings, listen  # the other commands need no web server

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the stages have it, read when torch loads
    load = _loader(arguments)
    settings = ServerSettings(max_batch=arguments.max_batch, places=arguments.queue,
                              token=read_token(arguments.token_env), max_body_bytes=arguments.max_body_mib * 2**20)
    with listen(arguments.host, arguments.port) as listener:
        if not _loopback(arguments.host):
            logging.warning("%s is not loopback: others can reach it, and nothing is encrypted%s", arguments.host,
                            "" if settings.token else "; no token is asked for (see --token-env)")
        host, port = listener.getsockname()[:2]
        logging.info("%s on http://%s:%d", arguments.scorer, f"[{host}]" if ":" in host else host, port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the server handles both, then raises them again for us
        ScorerServer(load, settings).run(listener)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Print a line a rule of the protocol; 1 if the server at the URL breaks any."""
    from swaralign.scoring.conformance import findings

    url = arguments.url.rstrip("/").removesuffix("/score")
    broken = 0
    for finding in findings(url, read_token(arguments.token_env)):
        broken += not finding.held
        print(f"{'held  ' if finding.held else 'BROKEN'} {finding.rule:<58} {finding.found[:100]}", flush=True)
    if broken:
        print(f"{broken} rule{'s' if broken > 1 else ''} broken", file=sys.stderr)
    return 1 if broken else 0


def read_token(variable: str | None) -> str | None:
    """The token in that environment variable, None if none is named. Raises ValueError if it is not set."""
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ValueError(f"--token-env is {variable}, but that environment variable is not set")
    return token


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Give a parser the commands `serve` and `check`."""
    actions = parser.add_subparsers(required=True, metavar="serve|check")
    serving = actions.add_parser("serve", help="serve one scorer; see docs/scorer.md")
    serving.add_argument("scorer", help=f"{', '.join(REWARDS)}, an entry point, or module:attribute")
    serving.add_argument("--params", type=Path, default=Path("params.yaml"), help="settings of a reward of ours")
    serving.add_argument("--checkpoint", type=Path, help="the voice, for the similarity engine policy")
    serving.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of a scorer of yours")
    serving.add_argument("--host", default="127.0.0.1", help="another than loopback lets others in")
    serving.add_argument("--port", type=int, default=18080, help="0 takes a free one")
    serving.add_argument("--token-env", metavar="NAME", help="environment variable with the bearer token to ask for")
    serving.add_argument("--max-batch", type=_positive, default=16, help="takes that go through the model together")
    serving.add_argument("--queue", type=_positive, default=64, help="takes held at once; more get 429")
    serving.add_argument("--max-body-mib", type=_positive, default=8, help="larger bodies are refused")
    serving.set_defaults(run=run_serve)
    checking = actions.add_parser("check", help="send a server a conforming take and malformed ones")
    checking.add_argument("url", help="as http://127.0.0.1:18080")
    checking.add_argument("--token-env", metavar="NAME", help="environment variable with the bearer token")
    checking.set_defaults(run=run_check)


def _loader(arguments: argparse.Namespace) -> Callable[[], AudioScorer]:
    settings = dict(map(_setting, arguments.set))
    if arguments.scorer not in REWARDS:
        sys.path.insert(0, "")  # for module:attribute in the working directory
        factory = find_factory(arguments.scorer)
        return lambda: factory(**settings)
    if settings:
        raise ValueError(f"--set is for scorers of yours; the settings of {arguments.scorer} are in {arguments.params}")

    def load() -> AudioScorer:
        from swaralign.scoring.served import load_reward

        return load_reward(arguments.scorer, arguments.params, arguments.checkpoint)

    return load


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes KEY=VALUE, found {text!r}")
    return key, YAML(typ="safe", pure=True).load(value)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
