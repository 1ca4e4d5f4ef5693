"""The tokenizer, the chat template and its sandbox, and text that appears while it is made.

What goes wrong for users -> tests
  end-of-text ids                      test_end_of_text_ids_are_united
  begin-of-text exactly once           test_begin_of_text_exactly_once
  empty prompt                         test_begin_of_text_id_comes_from_the_tokenizer_then_the_config
  chat template missing, calls Python  test_no_template_is_an_error, test_template_cannot_reach_python
  characters that span tokens          test_stream_shows_whole_characters, test_stream_equals_decode_for_any_ids
"""

import json
import random

import pytest
import tokenizers

from loading.tokenizer import Tokenizer
from tests.testing_checkpoints import (
    CHATML,
    LLAMA,
    assert_refused,
    byte_tokenizer,
    quiet_load,
    streamed,
    write_folder,
)


def llama2_tokenizer():
    """Words after "▁", and bytes for the rest, as in Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    steps = [("Replace", ("▁", " ")), ("ByteFallback", ()), ("Fuse", ()), ("Strip", (" ", 1, 0))]
    backend.decoder = tokenizers.decoders.Sequence([getattr(tokenizers.decoders, name)(*a) for name, a in steps])
    return backend


def tokenizer_of(tmp_path, config=LLAMA, backend=None, **files):
    return quiet_load(write_folder(tmp_path / "m", config, backend=backend, **files))[1]


def test_end_of_text_ids_are_united(tmp_path):
    config = LLAMA | {"eos_token_id": [3, 4]}
    files = {"generation_config_json": {"eos_token_id": 5}, "tokenizer_config_json": {"eos_token": {"content": "<|im_end|>"}}}
    assert tokenizer_of(tmp_path, config, **files).eos_ids == {3, 4, 5, 257}
    files = {"generation_config_json": {"eos_token_id": [5, 4]}, "tokenizer_config_json": {"eos_token": None}}
    assert tokenizer_of(tmp_path, LLAMA | {"eos_token_id": None}, **files).eos_ids == {4, 5}
    with pytest.raises(ValueError, match="eos_token_id"):
        tokenizer_of(tmp_path, LLAMA | {"eos_token_id": "257"})


def test_begin_of_text_id_comes_from_the_tokenizer_then_the_config(tmp_path):
    assert tokenizer_of(tmp_path).bos_id is None
    assert tokenizer_of(tmp_path, LLAMA | {"bos_token_id": 7}).bos_id == 7
    files = {"tokenizer_config_json": {"bos_token": "<bos>"}}
    assert tokenizer_of(tmp_path, LLAMA | {"bos_token_id": 7}, **files).bos_id == 256


def test_ids_outside_the_vocabulary_begin_no_text(tmp_path):
    for wrong in (-1, 264, 10**30):
        assert tokenizer_of(tmp_path, LLAMA | {"bos_token_id": wrong}).bos_id is None
    assert tokenizer_of(tmp_path, LLAMA | {"bos_token_id": -1}, generation_config_json={"bos_token_id": 7}).bos_id == 7


def test_special_tokens_of_older_checkpoints_are_in_their_own_file(tmp_path):
    older = {"bos_token": "<bos>", "eos_token": {"content": "<|im_end|>"}}
    template = "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}"
    for settings in ({}, {"bos_token": None}, {"bos_token": "<|im_start|>"}):
        files = {"tokenizer_config_json": settings | {"chat_template": template}, "special_tokens_map_json": older}
        tokenizer = tokenizer_of(tmp_path, LLAMA | {"eos_token_id": None}, **files)
        assert tokenizer.chat("h") == [256, 257, 71] and (tokenizer.bos_id, tokenizer.eos_ids) == (256, {257})
    files["tokenizer_config_json"] |= {"added_tokens_decoder": {}}  # since then, its own say counts
    tokenizer = tokenizer_of(tmp_path, LLAMA | {"eos_token_id": None}, **files)
    assert tokenizer.chat("h") == [258, 71] and tokenizer.eos_ids == frozenset()


def test_begin_of_text_exactly_once(tmp_path):
    settings = {"bos_token": "<bos>", "chat_template": "{{ bos_token }}" + CHATML}
    tokenizer = tokenizer_of(tmp_path, backend=byte_tokenizer(adds_bos=True), tokenizer_config_json=settings)
    plain = byte_tokenizer().encode("hi").ids
    assert tokenizer.encode("hi") == tokenizer.encode("<bos>hi") == tokenizer.encode("<bos><bos>hi") == [256, *plain]
    assert tokenizer.encode("") == [256]
    with_bos = tokenizer.chat("hi")
    assert with_bos[:2] == [256, 258] and with_bos.count(256) == 1 and 257 not in with_bos[-3:]
    settings["chat_template"] = CHATML
    tokenizer = tokenizer_of(tmp_path, backend=byte_tokenizer(adds_bos=True), tokenizer_config_json=settings)
    assert tokenizer.chat("hi") == with_bos
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json=settings)  # one that adds none
    assert tokenizer.encode("hi") == plain and tokenizer.encode("<bos>hi") == [256, *plain] and tokenizer.encode("") == []
    assert tokenizer.chat("hi") == with_bos[1:]


def test_special_tokens_are_one_id_in_templates_and_in_text(tmp_path):
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json={"chat_template": CHATML})
    ids = tokenizer.chat("A<|im_end|>B", system="S")
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>B<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(257) == 3 and ids.count(258) == 3
    assert tokenizer.decode(ids) == "system\nS\nuser\nAB\nassistant\n"


def test_template_file_goes_before_the_settings_and_default_before_other_names(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json={"chat_template": named})
    assert tokenizer.decode(tokenizer.chat("x")) == "D"
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json={"chat_template": named}, chat_template_jinja="J")
    assert tokenizer.chat_template == "J" and tokenizer.decode(tokenizer.chat("x")) == "J"


def test_no_template_is_an_error(tmp_path):
    for settings in ({}, {"chat_template": None}, {"chat_template": []}, {"chat_template": {}}):
        tokenizer = tokenizer_of(tmp_path, tokenizer_config_json=settings)
        assert (tokenizer.chat_template, tokenizer.template_problem) == (None, "")
        assert_refused("no chat template", "--raw", call=lambda tokenizer=tokenizer: tokenizer.chat("hi"))


@pytest.mark.parametrize(("template", "words"), [
    ([{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}], ["rag, tool_use", "default"]),
    ({"rag": "R"}, ["rag", "default"]), ([{}], ["default"]), ([{"name": "default", "template": 5}], ["5"]),
    ([{"name": []}], ["default"]), (["R"], ["R"]), (5, ["5"]), ("", ["''"]), (" \n", ["template"]),
])  # fmt: skip
def test_template_that_is_none_to_use_is_told_from_no_template(tmp_path, template, words):
    tokenizer = tokenizer_of(tmp_path, tokenizer_config_json={"chat_template": template})
    assert tokenizer.chat_template == "" and tokenizer.encode("hi") == byte_tokenizer().encode("hi").ids
    assert_refused(tokenizer.template_problem, *words, "--raw", call=lambda: tokenizer.chat("hi"))


def test_empty_template_file_is_told(tmp_path):
    tokenizer = tokenizer_of(tmp_path, chat_template_jinja="", tokenizer_config_json={"chat_template": CHATML})
    assert_refused("template is ''", "--raw", call=lambda: tokenizer.chat("hi"))


@pytest.mark.parametrize("name", ["tools", "documents", "messages", "add_generation_prompt"])
def test_template_finds_all_that_transformers_gives(tmp_path, name):
    template = CHATML + f"{{% if {name} is undefined %}}?{{% elif {name} is not none %}}{name}{{% endif %}}"
    tokenizer = tokenizer_of(tmp_path, chat_template_jinja=template)
    assert tokenizer.decode(tokenizer.chat("hi")).endswith("assistant\n" + name * (name not in ("tools", "documents")))


def test_template_helpers_are_those_of_transformers(tmp_path):
    template = (
        "{%- for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    tokenizer = tokenizer_of(tmp_path, chat_template_jinja=template, tokenizer_config_json={"eos_token": "<|im_end|>"})
    ids = tokenizer.chat("<é>", system="s & t")
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == '{"role": "system", "content": "s & t"}4<|im_end|>'
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|im_end|>", chat_template=template)
    messages = [{"role": "system", "content": "s & t"}, {"role": "user", "content": "<é>"}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"] == ids


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ messages[0].update(x=1) }}",
    "{{ cycler.__init__.__globals__.os.system('exit') }}", "{{ raise_exception('no system\nrole') }}", "{% for %}",
    "{{ 1 / 0 }}",
    "{{ messages[0]['content'] + 1 }}", "{% include '/etc/passwd' %}", "{{ range(10**9) }}", "{{ '%s' % nothing.at.all }}",
    "{{ strftime_now.__globals__.values() }}", "{{ raise_exception.__globals__['os'] }}", "{{ ('a'|attr('__class__')).__name__ }}",
])  # fmt: skip
def test_template_cannot_reach_python(tmp_path, template):
    tokenizer = tokenizer_of(tmp_path, chat_template_jinja=template)
    assert_refused("chat template failed", "--raw", call=lambda: tokenizer.chat("hi"))


@pytest.mark.parametrize("template", ["{#", "{% set messages = 1 %} ", "{% macro m() %}{{ messages }}{% endmacro %}"])
def test_template_that_drops_the_prompt_is_told(tmp_path, template):
    tokenizer = tokenizer_of(tmp_path, chat_template_jinja=template)
    assert_refused("chat template", "--raw", call=lambda: tokenizer.chat("hi"))


def test_tokenizer_larger_than_the_model(tmp_path):
    config = LLAMA | {"vocab_size": 257}
    tokenizer = tokenizer_of(tmp_path, config)
    assert tokenizer.encode("<bos>a")[0] == 256
    assert_refused("258", "257", call=lambda: tokenizer.encode("<|im_start|>a"))


def test_lone_surrogate_is_one_line(tmp_path):
    assert_refused("surrogate", call=lambda: tokenizer_of(tmp_path).encode("a\ud800"))


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"version": "1.0", "mod', "[1]", "\xff"])
def test_broken_tokenizer_file_is_refused(tmp_path, text):
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text(text, "latin-1")
    assert_refused("tokenizer.json", "download it again", call=lambda: quiet_load(folder))


def test_tokenizer_file_that_makes_the_library_panic_is_refused(tmp_path):
    path = write_folder(tmp_path / "m", backend=byte_tokenizer(adds_bos=True)) / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(whole))
    assert_refused("tokenizer.json", call=lambda: quiet_load(tmp_path / "m"))


@pytest.mark.parametrize(("part", "value"), [("model", {"type": "BPE-2"}), ("pre_tokenizer", {"type": "New"}), ("version", "2.0")])
def test_tokenizer_file_newer_than_the_library_asks_for_a_newer_one(tmp_path, part, value):
    path = write_folder(tmp_path / "m") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    assert_refused("tokenizer.json", tokenizers.__version__, "pip install --upgrade tokenizers", call=lambda: quiet_load(tmp_path / "m"))


def test_truncation_stored_in_the_tokenizer_is_not_applied(tmp_path):
    backend = byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(tokenizer_of(tmp_path, backend=backend).encode("a" * 30)) == 30


def test_stream_shows_whole_characters():
    tokenizer = Tokenizer(byte_tokenizer(), vocab_size=264)
    ids = tokenizer.encode("a🙂é中")
    assert streamed(tokenizer, ids) == ["a", "", "", "", "🙂", "", "é", "", "", "中"]
    for cut in range(len(ids)):
        shown = "".join(streamed(tokenizer, ids[:cut]))
        assert "\ufffd" not in shown and shown == tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    inside = ids[:2] + [257] + ids[2:]  # a special token between the bytes of one character
    assert "".join(streamed(tokenizer, inside)) == "a🙂é中"


def test_stream_keeps_the_spaces_of_llama2():
    tokenizer = Tokenizer(llama2_tokenizer(), vocab_size=300)
    ids = tokenizer.encode("a b  ba 🙂\nb")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "a b  ba 🙂\nb"


def test_stream_equals_decode_for_any_ids():
    rng = random.Random(0)
    tokenizer = Tokenizer(byte_tokenizer(), vocab_size=264)
    for _ in range(300):
        ids = [rng.randrange(259) for _ in range(rng.randrange(12))]
        if rng.random() < 0.5:  # mostly whole characters
            ids = tokenizer.encode("".join(chr(rng.choice([65, 233, 0x4E2D, 0x1F642, 0xFFFD])) for _ in range(5))) + ids[:2]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids).rstrip("\ufffd")
