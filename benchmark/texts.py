"""What is decoded: prompts from a file, some of the project's own, questions with short answers, long documents."""

import json
import types
from pathlib import Path
from pydoc_data.topics import topics

from cli.options import encode_prompt
from rivals.draft_verify import PROMPTS

SHORT = {  # answered in one to forty tokens
    "capital": "What is the capital of France? Answer with one word.",
    "day": "Which day comes after Monday? Answer with one word.",
    "opposite": "What is the opposite of hot? Answer with one word.",
    "planets": "Name the planets of the solar system, separated by commas.",
    "translate": "Translate into French: Good morning, my friend.",
    "boiling": "At which temperature does water boil at sea level? Answer in one short sentence.",
}
DOCUMENTS = {  # topic of Python's own documentation -> (tokens of it, what is asked)
    "specialnames": (7000, "Summarise the text above."),
    "compound": (6500, "By the text above, when is the else clause of a try statement executed, and when that of a loop?"),
    "types": (6000, "Summarise the text above."),
    "formatstrings": (5500, "By the text above, how is a number shown with a comma for each thousand and two decimals?"),
    "string-methods": (5000, "Summarise the text above."),
    "typesseq": (4500, "By the text above, how do lists, tuples and ranges differ?"),
    "debugger": (4000, "Summarise the text above."),
    "typesmapping": (3200, "By the text above, what do the methods get, pop and setdefault of a dictionary do?"),
}


def read_prompts(path):
    """[(id, text)] of a file: *.jsonl has a prompt in each line, any other file is one.

    A line holds `prompt`, `text` or `turns`, of which the first is taken (Spec-Bench), and maybe `id` or `question_id`.
    Raises ValueError.
    """
    path = Path(path)
    try:
        content = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --prompts {path} ({error}): pass a text file or JSON lines in UTF-8") from None
    if not content.strip():
        raise ValueError(f"--prompts {path} is empty: pass a file with text")
    if path.suffix != ".jsonl":
        return [(path.name, content)]
    prompts = []
    for i, line in enumerate(content.split("\n"), 1):
        try:
            values = json.loads(line) if line.strip() else {"text": None}
            every = [values.get("prompt"), values.get("text"), *(values.get("turns") or ())[:1]]
            texts = [text for text in every if isinstance(text, str) and text.strip()]
            prompts += [(str(values.get("id", values.get("question_id", i))), texts[0])] if line.strip() else []
        except (ValueError, TypeError, AttributeError, IndexError):
            raise ValueError(f"--prompts {path}, line {i} is no JSON object with a text as `prompt`, `text` or the first of `turns`: "
                             "correct it; plain text needs another name") from None  # fmt: skip
    return prompts


def spread(values, count):
    """At most `count` of a list, evenly spread."""
    return [values[i] for i in sorted({(2 * i + 1) * len(values) // (2 * count) for i in range(count)})] if values else []


def encoded(prompts, tokenizer, config):
    """[(id, text)] -> [(id, token ids)], in the chat template if there is one. Raises ValueError."""
    options = types.SimpleNamespace(raw=False, system=None)
    return [(prompt_id, encode_prompt(options, text, tokenizer, config)) for prompt_id, text in prompts]


def own_prompts(count, tokenizer, config):
    """[(id, token ids)] of at most `count` of the project's prompts, evenly from the whole file."""
    return encoded(spread(read_prompts(PROMPTS), count), tokenizer, config)


def documents(tokenizer, config, names=tuple(DOCUMENTS)):
    """[(topic, token ids)] of DOCUMENTS, each cut to about its tokens, or to what leaves 512 of the model's context."""
    prompts = []
    for name in names:
        tokens, question = DOCUMENTS[name]
        text, whole = topics[name], len(tokenizer.encode(topics[name]))
        text = text[: len(text) * min(tokens, config.max_position - 512) // whole]
        prompts.append((name, f"{text}\n\n{question}"))
    return encoded(prompts, tokenizer, config)


def running_text(texts, tokenizer, length):
    """`length` token ids of the texts, one after another without a template, again and again until it is long enough."""
    ids = tokenizer.encode("\n\n".join(texts))
    return (ids * -(-length // len(ids)))[:length]
