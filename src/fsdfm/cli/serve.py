"""The server: `fsdfm serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.completion import complete_models
from fsdfm.cli.sampling import Machine, takes_groups

__all__ = ["serve"]


@takes_groups
def serve(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A checkpoint, a run or an embedded model; may be repeated.", autocompletion=complete_models),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: other machines may ask.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the key that clients must send; else FSDFM_API_KEY, if it is set.")
    ] = None,
    cors: Annotated[list[str] | None, typer.Option(help="An origin whose pages may ask; may be repeated.")] = None,
    max_canvas: Annotated[int, typer.Option(help="Tokens of a text, what is given included.")] = 1024,
    running: Annotated[int, typer.Option(help="Texts on their way at a time.")] = 16,
    waiting: Annotated[int, typer.Option(help="Texts that may wait; more are refused with 429.")] = 256,
    batch: Annotated[int, typer.Option(help="Texts of a network call.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds after which a text is given up.")] = 120.0,
    drain: Annotated[float, typer.Option(help="Seconds to finish in when told to stop.")] = 30.0,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write what is asked into the log.")] = False,
    machine: Machine,
) -> None:
    """Serve models: OpenAI's completions, infill, repair, streamed states, and a page to play with."""
    try:
        from fsdfm.serve.config import ServeConfig, read_api_key
        from fsdfm.serve.server import load_models, run_server
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs the package {error.name}: pip install 'fsdfm[serve]'") from error
    from fsdfm.demo import measured_fragment

    config = ServeConfig(
        host=host,
        port=port,
        api_key=read_api_key(api_key_file),
        cors=tuple(cors or ()),
        max_canvas=max_canvas,
        running=running,
        waiting=waiting,
        batch=batch,
        request_seconds=timeout,
        drain_seconds=drain,
        threads=machine.threads,
        log_prompts=log_prompts,
    )
    models = load_models(model or (), device=machine.device, precision=machine.precision, threads=machine.threads)
    run_server(models, config, extra=measured_fragment(models))
