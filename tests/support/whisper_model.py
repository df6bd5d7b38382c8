"""Writes a small Whisper model that hears the same words in every recording, and recordings for it."""

from __future__ import annotations

import io
import itertools
import math
import wave
from pathlib import Path
from typing import Any

import numpy as np

SAID = ["Hello", " world", "."]
ENDS = 0.5
"""Seconds from the start of a window to the end of its one segment."""
_WIDTH, _FRAMES, _TOKENS = 64, 1500, 448


def sound(seconds: float) -> bytes:
    """Write a WAV file with a tone."""
    rate, written = 16_000, io.BytesIO()
    tone = 9_000 * np.sin(2 * math.pi * 440 * np.arange(int(rate * seconds)) / rate)
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone.astype("<i2").tobytes())
    return written.getvalue()


def write_model(folder: Path) -> str:
    """Write a model of CTranslate2 whose layers add nothing, so that each token names the next one."""
    from ctranslate2.specs import WhisperSpec
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel as Split

    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>"]
    special += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    times = [f"<|{at * 0.02:.2f}|>" for at in range(1501)]
    words = [word.replace(" ", "Ġ") for word in SAID]
    letters = sorted({*Split.alphabet()} - {*words})
    tokens = [*letters, *words, *special, *times]
    folder.mkdir()
    tokenizer = Tokenizer(BPE({token: at for at, token in enumerate([*letters, *words])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split(add_prefix_space=False), ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in [*special, *times]])
    tokenizer.save(str(folder / "tokenizer.json"))

    spec = WhisperSpec(1, 1, 1, 1)
    random = np.random.default_rng(0)
    embeddings = random.standard_normal((len(tokens), _WIDTH)).astype(np.float32)
    _norms(spec)
    for layer in (*spec.encoder.layer, *spec.decoder.layer):
        for attention in (layer.self_attention, getattr(layer, "attention", None)):
            if attention is not None:
                crossed = attention is not layer.self_attention
                sizes = [_WIDTH, 2 * _WIDTH, _WIDTH] if crossed else [3 * _WIDTH, _WIDTH]
                for linear, size in zip(attention.linear, sizes, strict=True):
                    _linear(linear, size, _WIDTH)
        _linear(layer.ffn.linear_0, _WIDTH, _WIDTH)
        _linear(layer.ffn.linear_1, _WIDTH, _WIDTH)
    for convolution, mels in ((spec.encoder.conv1, 80), (spec.encoder.conv2, _WIDTH)):
        convolution.weight = np.zeros((_WIDTH, mels, 3), np.float32)
        convolution.bias = np.zeros(_WIDTH, np.float32)
    spec.encoder.position_encodings.encodings = random.standard_normal((_FRAMES, _WIDTH)).astype(np.float32)
    spec.decoder.position_encodings.encodings = np.zeros((_TOKENS, _WIDTH), np.float32)
    spec.decoder.embeddings.weight = embeddings
    chain = ["<|startoftranscript|>", "<|0.00|>", *words, f"<|{ENDS:.2f}|>", "<|endoftext|>"]
    follows = np.zeros_like(embeddings)
    for token, after in itertools.pairwise(chain):
        follows[tokens.index(after)] += embeddings[tokens.index(token)]
    spec.decoder.projection.weight = follows
    spec.decoder.projection.bias = np.zeros(len(tokens), np.float32)
    spec.config.suppress_ids, spec.config.suppress_ids_begin, spec.config.lang_ids = [], [], []
    spec.config.alignment_heads = [(0, 0)]
    spec.register_vocabulary(tokens)
    spec.validate()
    spec.save(str(folder))
    return str(folder)


def _norms(spec: Any) -> None:
    from ctranslate2.specs.common_spec import LayerNormSpec
    from ctranslate2.specs.model_spec import visit_spec

    def fill(owner: Any, name: str, _: Any) -> None:
        if isinstance(owner, LayerNormSpec) and name.endswith(("gamma", "beta")):
            setattr(owner, name.rpartition("/")[2], np.full(_WIDTH, name.endswith("gamma"), np.float32))

    visit_spec(spec, fill)


def _linear(linear: Any, rows: int, columns: int) -> None:
    linear.weight, linear.bias = np.zeros((rows, columns), np.float32), np.zeros(rows, np.float32)
