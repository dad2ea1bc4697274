"""`swaralign scorer serve|check`, which `python -m swaralign.scoring` also offers."""

from __future__ import annotations

import argparse
import inspect
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from swaralign.scoring.messages import read_token
from swaralign.scoring.plugins import REWARDS, AudioScorer, find_factory


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve a scorer until SIGTERM or Ctrl-C, and finish what is in flight."""
    from swaralign.scoring.server import ScorerServer, ServerSettings, listen  # the other commands need no web server

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the stages have it, read when torch loads
    load = _loader(arguments)
    settings = ServerSettings(max_batch=arguments.max_batch, places=arguments.queue,
                              token=_token(arguments), max_body_bytes=arguments.max_body_mib * 2**20)
    with listen(arguments.host, arguments.port) as listener:
        if not _loopback(arguments.host):
            logging.warning("%s is not loopback: others can reach it, and nothing is encrypted%s", arguments.host,
                            "" if settings.token else "; no token is asked for (see --token-env)")
        server = ScorerServer(load, settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())  # it handles both while it runs, then raises them again
        host, port = listener.getsockname()[:2]
        logging.info("%s on http://%s:%d", arguments.scorer, f"[{host}]" if ":" in host else host, port)
        server.run(listener)
    if server.batcher.scorer is None:
        os._exit(0)  # stopped while loading: Python would wait for the thread that loads
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Print a line a rule of the protocol; 1 if the server at the URL breaks any."""
    from swaralign.scoring.conformance import findings

    url = arguments.url.rstrip("/").removesuffix("/score")
    broken = 0
    for finding in findings(url, _token(arguments)):
        broken += not finding.held
        print(f"{'held  ' if finding.held else 'BROKEN'} {finding.rule:<58} {finding.found[:100]}", flush=True)
    if broken:
        print(f"{broken} rule{'s' if broken > 1 else ''} broken", file=sys.stderr)
    return 1 if broken else 0


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
    serving.add_argument("--max-batch", type=positive, default=16, help="takes that go through the model together")
    serving.add_argument("--queue", type=positive, default=64, help="takes held at once; more get 429")
    serving.add_argument("--max-body-mib", type=positive, default=8, help="larger bodies are refused")
    serving.set_defaults(run=run_serve)
    checking = actions.add_parser("check", help="send a server a conforming take and malformed ones")
    checking.add_argument("url", help="as http://127.0.0.1:18080")
    checking.add_argument("--token-env", metavar="NAME", help="environment variable with the bearer token")
    checking.set_defaults(run=run_check)


def _token(arguments: argparse.Namespace) -> str | None:
    return read_token(arguments.token_env, "--token-env") if arguments.token_env is not None else None


def _loader(arguments: argparse.Namespace) -> Callable[[], AudioScorer]:
    settings = dict(map(_setting, arguments.set))
    if arguments.scorer not in REWARDS:
        sys.path.insert(0, "")  # for module:attribute in the working directory
        return partial(_build, arguments.scorer, _fitting(find_factory(arguments.scorer), settings))
    if settings:
        raise ValueError(f"--set is for scorers of yours; the settings of {arguments.scorer} are in {arguments.params}")

    def load() -> AudioScorer:
        from swaralign.scoring.served import load_reward

        return load_reward(arguments.scorer, arguments.params, arguments.checkpoint)

    return load


def _fitting(factory: Callable[..., AudioScorer], settings: dict[str, Any]) -> Callable[[], AudioScorer]:
    """The factory with its settings; raises ValueError if it takes no such ones."""
    if inspect.isabstract(factory):
        raise ValueError(f"{factory.__name__} is an abstract class; its `score` is not written")
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        raise ValueError(f"the settings of --set do not fit: {error}") from error
    return partial(factory, **settings)


def _build(name: str, factory: Callable[[], AudioScorer]) -> AudioScorer:
    scorer = factory()
    if not isinstance(scorer, AudioScorer):
        raise ValueError(f"the scorer {name!r} gave a {type(scorer).__name__}; it must be a class, or a function that "
                         "returns an instance, of swaralign.scoring.AudioScorer")
    return scorer


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes KEY=VALUE, found {text!r}")
    try:
        return key, YAML(typ="safe", pure=True).load(value)
    except (YAMLError, ValueError) as error:  # the latter for a date of month 13
        raise ValueError(f"--set {key}: {value!r} is not a YAML value; quote it") from error


def positive(text: str) -> int:
    """An argument that must be an integer above 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
