"""Times lungmask's R231 on a scan; run by `benchmark.py --lungmask` with an interpreter that has lungmask.

Random weights of its own architecture, since its speed does not depend on them; its post-processing, whose speed would,
is left out, which is in its favour. Prints JSON: seconds of loading, reading and segmenting.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path


def main() -> int:
    """Argument: the scan."""
    with redirect_stdout(sys.stderr):  # where lungmask's own messages would mix with the answer
        times = _timed(sys.argv[1])
    json.dump(times, sys.stdout)
    return 0


def _timed(scan: str) -> dict[str, float]:
    start = time.perf_counter()
    import SimpleITK as sitk  # noqa: N813  its own documentation's name
    import torch
    from lungmask.mask import LMInferer
    from lungmask.resunet import UNet

    torch.manual_seed(0)
    network = UNet(n_classes=3, padding=True, depth=5, up_mode="upsample", batch_norm=True, residual=False)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "random.pth"
        torch.save(network.state_dict(), weights)
        inferer = LMInferer(modelpath=str(weights), volume_postprocessing=False, tqdm_disable=True)
    loaded = time.perf_counter()
    image = sitk.ReadImage(scan)
    read = time.perf_counter()
    inferer.apply(image)
    done = time.perf_counter()
    return {"load_s": loaded - start, "read_s": read - loaded, "apply_s": done - read}


if __name__ == "__main__":
    raise SystemExit(main())
