from collections.abc import Sequence

import numpy as np

def gather(
    sources: Sequence[memoryview],
    numbers: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    out: np.ndarray,
    past_caches: bool,
) -> None: ...
def decode(
    frames: Sequence[memoryview],
    out: np.ndarray,
    filtered: bool,
    channels: int,
    height: int,
    width: int,
    past_caches: bool,
) -> int: ...
def undo_image(rows: np.ndarray, channels: int, height: int, width: int) -> None: ...
def load_zstd(path: str) -> bool: ...
