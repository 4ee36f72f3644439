"""The ``stepgraph`` command. Each subcommand is a file of this folder, imported when it is called."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from itertools import pairwise

import click

from stepgraph.planner.diagnostics import CapabilityError, Diagnostic, StepgraphError
from stepgraph.tools.output import tell

SUBCOMMANDS = {
    "check": "Check a schedule: every error at once, with its place.",
    "compile": "Compile a schedule to a plan and prove it.",
    "show": "Show what each stream of a rank does.",
    "memory": "Show where targets lie, and when they are in use.",
    "run": "Run a denoising loop and compare it with the unsharded model.",
    "compare": "Compare a step with the unsharded model, op by op.",
    "verify": "Prove a plan free of races and deadlocks.",
    "diff": "Tell how two schedules or plans differ.",
    "schema": "Print the JSON Schema of schedules.",
    "explain": "Explain a code, an op kind or a field.",
    "init": "Write a schedule to start from.",
    "bench": "Measure what stepgraph itself takes.",
    "doctor": "Tell what this machine can run.",
}
INTERNAL_ERROR = 101
NO_MEMORY = Diagnostic("E606", "this machine has too little memory for that", hint="take smaller sizes")


class Commands(click.Group):
    """Loads a subcommand's file when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module = import_module(f"stepgraph.tools.{cmd_name}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stepgraph", message="stepgraph %(version)s")
def cli() -> None:
    """Schedules of diffusion transformers: compiled, proven, replayed.

    FILE is a path, or the name of a shipped schedule, as `quickstart`. Exit codes: 0 fine, 1 findings, 2 usage or I/O,
    3 a capability is missing, 101 an error of our own.
    """


def run(arguments: list[str]) -> int:
    """Run the command; gives the exit code."""
    try:
        result = cli.main(args=arguments, prog_name="stepgraph", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except StepgraphError as error:
        tell(error, "json" if _wants_json(arguments) else "text")
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        return 2
    except MemoryError:
        tell(CapabilityError([NO_MEMORY]), "json" if _wants_json(arguments) else "text")
        return CapabilityError([NO_MEMORY]).exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's flush is quiet too
        return 0
    except OSError as error:
        print(f"stepgraph: {error.filename or 'I/O'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except Exception as error:
        if os.environ.get("STEPGRAPH_DEBUG"):
            traceback.print_exc()
        print(
            f"stepgraph: internal error: {type(error).__name__}: {error}\nThis is a bug of stepgraph; please report it "
            "with the schedule and the command. STEPGRAPH_DEBUG=1 shows where it happened.",
            file=sys.stderr,
        )
        return INTERNAL_ERROR


def _wants_json(arguments: list[str]) -> bool:
    return "--format=json" in arguments or ("--format", "json") in pairwise(arguments)


def main() -> None:
    """Entry point of the ``stepgraph`` script."""
    if os.environ.get("STEPGRAPH_DEBUG"):
        import logging

        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
