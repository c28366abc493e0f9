"""Real text that every machine has: the sources of Python's standard library.

A byte is a token, so there is nothing to download and no tokenizer to learn.
"""

import pathlib
import sysconfig

import numpy as np

VOCABULARY = 256
HELD_OUT_EVERY = 16  # one file in 16 is kept for validation, never trained on


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Training and validation bytes (uint8), the same for one Python version.

    The modules at the top of the library, in the order of their names, without
    those whose name starts with "_" (some of them are made by the installation).
    """
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("[a-z]*.py"), key=lambda file: file.name)
    if len(files) < HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"{library} holds {len(files)} Python sources: this Python came without the"
            " standard library's sources; use another one"
        )
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    held_out = texts[::HELD_OUT_EVERY]
    training = [text for i, text in enumerate(texts) if i % HELD_OUT_EVERY]
    return np.concatenate(training), np.concatenate(held_out)


def unigram_entropy(text: np.ndarray) -> float:
    """Nats per byte of the best guess that looks at no other byte."""
    counts = np.bincount(text, minlength=VOCABULARY)
    share = counts[counts > 0] / text.size
    return float(-(share * np.log(share)).sum())


def random_windows(
    text: np.ndarray, count: int, length: int, *, seed: tuple[int, ...]
) -> np.ndarray:
    """[count, length] int32, pieces of text that depend on the seed alone.

    With the step as part of the seed, a resumed run sees the batches that it would
    have seen without the break.
    """
    random = np.random.default_rng(seed)
    starts = random.integers(0, text.size - length + 1, count)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)
