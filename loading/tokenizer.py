"""Text to token ids and back, and the chat template, which runs in a sandbox.

Read it from top to bottom: Tokenizer, TextStream, the sandbox, and how a Tokenizer is built from a checkpoint's files.
"""

import json
from datetime import datetime
from itertools import takewhile

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from loading.files import first_line, read_json


class Tokenizer:
    """Text to token ids and back as the model's tokenizer.json says, and the model's chat template.

    bos_id: begin-of-text id or None; eos_ids: frozenset of ids that end a text; chat_template: Jinja source, None for a
    model that has none, and "" where it may have one that cannot be used: template_problem says why.
    """

    def __init__(self, backend, *, vocab_size, bos_id=None, eos_ids=(), chat_template=None, template_problem="",
                 special_tokens=None):  # fmt: skip
        self.backend, self.vocab_size, self.bos_id, self.eos_ids = backend, vocab_size, bos_id, frozenset(eos_ids)
        self.chat_template, self.template_problem = chat_template, template_problem
        self.special_tokens = special_tokens or {}  # {"bos_token": "<s>", ...}
        probe = backend.encode("a")  # shows the ids that the post-processor puts before every text
        self.prefix = [i for i, special in takewhile(lambda pair: pair[1], zip(probe.ids, probe.special_tokens_mask))]

    def encode(self, text):
        """Token ids of a text, with begin-of-text once if the tokenizer adds one, even if the text has it already.

        Names of special tokens in the text become those tokens, as in transformers. Raises ValueError.
        Differs: an end-of-text that the tokenizer would add is left out, since the text is to be continued.
        """
        try:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):  # which one depends on the version
            raise ValueError("the text holds half a surrogate pair, which is no character: pass valid UTF-8") from None
        while self.prefix and ids[: len(self.prefix)] == self.prefix:
            ids = ids[len(self.prefix) :]
        ids = self.prefix + ids
        if ids and max(ids) >= self.vocab_size:
            beyond = f"token id {max(ids)} is beyond the model's {self.vocab_size}"
            raise ValueError(f"{beyond}: put the tokenizer.json there that the model was made with")
        return ids

    def decode(self, ids):
        """Text of token ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self):
        """A new TextStream, to show text while it is made."""
        return TextStream(self)

    def chat(self, prompt, system=None):
        """Token ids of a user's prompt, set in the chat template up to where the answer begins.

        Raises ValueError where there is no template, where it fails and where it asks for what the sandbox forbids.
        Differs: a begin-of-text that the tokenizer adds but the template leaves out is added here, not by transformers.
        """
        if not self.chat_template:
            problem = self.template_problem or "the model has no chat template"
            raise ValueError(f"{problem}: pass --raw to have the plain prompt continued, without a template")
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            template = _template_environment().from_string(self.chat_template)
            given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
            text = template.render(**given, **self.special_tokens)
        except Exception as error:  # noqa: BLE001, a template is a stranger's program and can fail in any way
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"the model's chat template failed ({reason}): pass --raw to do without it") from None
        if prompt.strip() and not text.strip():
            raise ValueError("the model's chat template leaves nothing of the prompt: pass --raw to do without it")
        return self.encode(text)


class TextStream:
    """Turns ids into text one by one: joined, it is Tokenizer.decode's text without an unfinished last character."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.shown = []  # the last piece that was shown: what comes before decides on a leading space
        self.pending = []  # ids that are not shown yet

    def push(self, token_id):
        """The text that becomes certain with this id: whole characters, or "" while one is unfinished."""
        self.pending.append(token_id)
        before = self.tokenizer.decode(self.shown)
        text = self.tokenizer.decode(self.shown + self.pending)
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self.shown, self.pending = self.pending, []
        return text[len(before) :]


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks an assistant's words for training; here it only groups."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _template_environment():
    """The sandbox for chat templates, with the helpers that they find in transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def build_tokenizer(path, *, vocab_size, config, generation, settings, template=None, unasked=()):
    """Builds the Tokenizer from the path of tokenizer.json and what the files beside it say.

    config, generation, settings: the dicts of config.json, generation_config.json and tokenizer_config.json. template:
    the text of chat_template.jinja, which goes before the one in settings. unasked: the names of the files that may
    hold a template, but could not be asked for. Raises ValueError.
    """
    backend = _read_backend(path)
    backend.no_truncation()
    backend.no_padding()
    special = {key: value for key, value in settings.items() if key.endswith("_token")}
    special = {key: value.get("content") if type(value) is dict else value for key, value in special.items()}
    special = {key: value for key, value in special.items() if type(value) is str}

    def ids(role):
        """The ids in that role, wherever they are named; None where a place names none."""
        said = [place.get(f"{role}_token_id") for place in (config, generation)]
        token = special.get(f"{role}_token")
        found = [token and backend.token_to_id(token)]
        for value in said:
            found += value if type(value) is list else [value]
        if any(i is not None and type(i) is not int for i in found):
            raise ValueError(f"{role}_token_id is {said!r:.100}, not an id or a list of ids: correct the config files")
        return [i for i in found if i is not None]

    template, problem = _choose_template(settings.get("chat_template") if template is None else template, unasked)
    return Tokenizer(
        backend,
        vocab_size=vocab_size,
        bos_id=next((i for i in ids("bos") if 0 <= i < vocab_size), None),
        eos_ids=ids("eos"),
        chat_template=template,
        template_problem=problem,
        special_tokens=special,
    )


def _read_backend(path):
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        backend.encode("a")
        return backend
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001, the library raises no class of its own, and its panics are no Exception
        reason = first_line(error)
    if "model" in read_json(path):  # whole, so it is written for another version
        newer = f"tokenizers {tokenizers.__version__} does not understand it ({reason})"
        raise ValueError(f"{path}: {newer}: run pip install --upgrade tokenizers")
    raise ValueError(f"{path} is not a tokenizer ({reason}): download it again")


def _choose_template(found, unasked):
    """Tokenizer's chat_template and template_problem."""
    if type(found) is list and all(type(entry) is dict for entry in found):
        found = {str(entry.get("name")): entry.get("template") for entry in found}
    if type(found) is dict:  # several, by name
        names, found = ", ".join(map(str, found)), found.get("default")
        if found is None and names:
            return "", f"the model has chat templates for {names:.100} and none called default"
    if found is None and unasked:
        missing = f"the cache lacks {' and '.join(unasked)}, and the Hub is out of reach"
        return "", f"whether there is a chat template is unknown, as {missing} (go online once)"
    if found is not None and not (type(found) is str and found.strip()):
        return "", f"the model's chat template is {found!r:.100}"
    return found, ""
