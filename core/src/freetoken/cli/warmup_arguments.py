"""The arguments of ``freetoken warmup``, apart from the command itself, which imports more."""

from __future__ import annotations

import argparse

ACTIONS = ("plan", "compile", "verify", "report")

_ABOUT = (
    "plan: the steps, what each covers and its expected cost; needs no GPU and no weights. compile: fill a folder with "
    "compiled kernels that may be moved to another machine. verify: probe a server that is started for it, or the one "
    "at URL, and store a certificate. report: what earlier starts took and what they met late."
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _ABOUT
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("model_argument", metavar="MODEL|URL", nargs="?", help="what --model takes; a URL to verify")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")
    parser.add_argument("--target", metavar="CARD", help="plan or compile for h200, … or cuda:90,sms=132")
    parser.add_argument("--output", metavar="DIR", help="where compiled kernels go; default: a folder of the cache")
    parser.add_argument("--probes", type=int, default=200, metavar="N", help="how many probes to send (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the probes' generator (default: 0)")
    parser.add_argument(
        "--profiled",
        type=int,
        default=24,
        metavar="N",
        help="further probes sent under the device's profiler (default: 24)",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="end a verification after S seconds, with what was proven by then"
    )
