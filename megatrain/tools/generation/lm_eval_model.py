"""The model of a checkpoint as a model of lm-evaluation-harness, whose package `lm_eval` this file imports.

results = lm_eval.simple_evaluate(model=MegatrainLM("runs/a/checkpoints"), tasks=["lambada_openai"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatrain.data.tasks.requests import Request, encode_pairs
from megatrain.inference.sampling import Sampling
from megatrain.inference.scoring import require_text_model, score
from megatrain.inference.stored_model import ModelOptions
from megatrain.inference.texts import TextEngine, encode_prompt, plan_cache
from megatrain.tools.generation.load import free_bytes, read_model


class MegatrainLM(LM):
    """A loaded model, in one process.

    Args:
        load: --save folder of a run, one of its iter_NNNNNNN folders, or a folder of transformers.
        dtype: of weights.
        batch_size: rows that are computed together.
        max_new_tokens: of `generate_until`, where a task does not say it.
    """

    def __init__(
        self,
        load: str,
        *,
        device: str = "cuda" if torch.cuda.is_available() else "cpu",
        dtype: torch.dtype | None = None,
        batch_size: int = 8,
        max_new_tokens: int = 256,
    ) -> None:
        super().__init__()
        self._torch_device = torch.device(device)
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        kind = dtype or (torch.bfloat16 if self._torch_device.type == "cuda" else torch.float32)
        options = ModelOptions(device=self._torch_device, dtype=kind, is_unlimited=True, is_rounded=True)
        self.loaded = read_model(load, options, print)
        require_text_model(self.loaded)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is greedy."""
        return self._scores(encode_pairs([one.args for one in requests], self.loaded.tokenizer))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the model's context."""
        tokenizer, found = self.loaded.tokenizer, []
        for one in requests:
            windows = get_rolling_token_windows(
                token_list=tokenizer.encode(one.args[0]),
                prefix_token=tokenizer.eod,
                max_seq_len=self.loaded.max_context,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            rows = [Request((*context, *text), len(text)) for context, text in pairs]
            found.append(sum(log_likelihood for log_likelihood, _ in self._scores(rows)))
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the text that follows each context, up to a text of `until`."""
        loaded = self.loaded
        prompts, samplings = [], []
        for context, options in (one.args for one in requests):
            until, is_drawn = options.get("until") or [], options.get("do_sample", False)
            count = min(options.get("max_gen_toks", self.max_new_tokens), loaded.max_context - 1)
            prompts.append(encode_prompt(loaded.tokenizer, context)[-(loaded.max_context - count) :])
            samplings.append(
                Sampling(
                    max_new_tokens=count,
                    temperature=options.get("temperature", 1.0) if is_drawn else 0,
                    top_p=options.get("top_p", 1.0),
                    stop=(until,) if isinstance(until, str) else tuple(until),
                )
            )
        plan = plan_cache(
            loaded.model,
            dtype=loaded.dtype,
            max_tokens=loaded.max_context,
            num_sequences=min(len(prompts), self.batch_size),
            limit_bytes=free_bytes(self._torch_device) // 2,
        )
        engine = TextEngine(loaded.model, loaded.tokenizer, plan, self._torch_device, loaded.end_ids)
        found = {
            id(engine.submit(*one)): number for number, one in enumerate(zip(prompts, samplings, strict=True))
        }
        texts = [""] * len(prompts)
        while not engine.engine.is_idle:
            for text, new in engine.step():
                texts[found[id(text)]] += new
        engine.engine.model.give_back()
        return texts

    def _scores(self, rows: Sequence[Request]) -> list[tuple[float, bool]]:
        scores = score(self.loaded, rows, batch_size=self.batch_size, device=self._torch_device)
        return [(one.log_likelihood, one.is_greedy) for one in scores]
