"""transformers' own generate() as methods: the same weights in the same process, plainly and with its own drafts."""

import time

import torch

from loading.default_model import default_model_folder

THEIRS = {  # name -> what it is told besides, given the model's number of layers
    "transformers": lambda n_layer: {},
    "transformers_early_exit": lambda n_layer: {"assistant_early_exit": max(1, n_layer // 4)},
    "transformers_prompt_lookup": lambda n_layer: {"prompt_lookup_num_tokens": 10},
}


def make_theirs(model, folder, names, options):
    """{name: method} for generate() on the same folder or Hub id, None being the default model. options: of decode()."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = default_model_folder() if folder is None else folder
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
    temperature = options.get("temperature", 0.0)
    settings = {"max_new_tokens": options["max_new_tokens"], "eos_token_id": sorted(options["eos_ids"]) or None, "pad_token_id": 0}
    settings |= {"do_sample": True, "temperature": temperature, "top_p": options["top_p"], "top_k": 0} if temperature else {"do_sample": False}

    def method(more):
        config = transformers.GenerationConfig(**settings, **more)

        def run(prompt_ids):
            torch.manual_seed(options.get("seed", 0))
            prompt, clock = torch.tensor([prompt_ids], device=model.device), Clock()
            out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config, streamer=clock)
            token_ids = out[0, len(prompt_ids) :].tolist()
            return {"token_ids": token_ids, "new_tokens": len(token_ids), "tokens_per_second": clock.rate()}

        return run

    return {name: method(THEIRS[name](model.config.n_layer)) for name in names}


class Clock:
    """A streamer for transformers: it is handed the prompt, then the new tokens, and keeps how many came when."""

    def __init__(self):
        self.arrivals = []

    def put(self, tokens):
        self.arrivals.append((tokens.numel(), time.perf_counter()))

    def end(self):
        pass

    def rate(self):
        """Tokens per second behind the first ones, which come with the prompt's forward. None if there are no more."""
        later = self.arrivals[2:]
        return sum(count for count, _ in later) / (later[-1][1] - self.arrivals[1][1]) if later else None
