"""Import torch and say what it is; the doctor runs this as a process."""

import json
import time

if __name__ == "__main__":
    started = time.monotonic()
    import torch

    seconds = round(time.monotonic() - started, 1)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    answer = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device,
        "seconds": seconds,
    }
    print(json.dumps(answer))
