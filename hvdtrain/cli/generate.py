"""``hvdtrain generate``: continue a text with a trained language model. transformers generates and prints it."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from hvdtrain.cli.parser import MODEL_HELP, Parser, above_0, positive
from hvdtrain.errors import ConfigError
from hvdtrain.observe.output import make_output_unfailing

_DESCRIPTION = """\
Continue a text with the model of a run's newest checkpoint, of a checkpoint, or
of a folder of transformers. Words are printed as they are generated."""
_EPILOG = """\
examples:
  hvdtrain generate runs/NAME --prompt 'def main('
  hvdtrain generate runs/NAME --prompt - --temperature 0 < question.txt
"""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain generate", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("path", metavar="RUN", help=MODEL_HELP)
    made.add_argument("--prompt", required=True, help="text to continue; - reads it from stdin")
    made.add_argument("--tokens", type=positive, default=200, help="number of tokens at most (default: 200)")
    temperature = partial(above_0, most=1e3, or_0=True)
    made.add_argument("--temperature", type=temperature, default=1.0, help="of sampling; 0: no sampling (default: 1)")
    made.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    return made


def main(argv: list[str]) -> int:
    """Generate and print; return 0. Errors: ConfigError: the prompt is empty or too long; those of the model."""
    make_output_unfailing()
    options = parser().parse_args(argv)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt:
        raise ConfigError("the prompt is empty", expected="at least one character")

    import torch

    from hvdtrain.task.base import import_library
    from hvdtrain.task.causal_lm import load_model
    from hvdtrain.task.encode import load_tokenizer
    from hvdtrain.task.saved_model import find_model
    from hvdtrain.training.start.device import pick_device

    transformers = import_library("transformers", "hvdtrain generate", "lm")
    transformers.utils.logging.disable_progress_bar()
    source = find_model(options.path, "RUN")
    print(f"model: {source.folder}", file=sys.stderr, flush=True)
    tokenizer = load_tokenizer(source.folder)
    device = pick_device(options.device, 0, 1)
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    model: Any = load_model(source).eval().to(device)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and (length := inputs.input_ids.shape[1]) + options.tokens > positions:
        raise ConfigError(
            "prompt and continuation are too long for the model",
            expected=f"{positions} tokens at most",
            found=f"{length} of the prompt, and --tokens {options.tokens}",
            next_step=f"--tokens {positions - length}" if length < positions else "use a shorter prompt",
        )
    torch.manual_seed(options.seed)
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    streamer = transformers.TextStreamer(tokenizer, skip_special_tokens=True)
    ends = model.generation_config.eos_token_id
    model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=options.tokens,
        streamer=streamer,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    return 0
