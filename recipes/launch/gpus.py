"""GPUs of a pod, by the UUIDs of their driver."""


def read_gpu_uuids() -> list[str]:
    """Return UUIDs of all GPUs visible to this container.

    Empty without a driver or with simulated GPUs.
    """
    import pynvml  # loads the driver's library, which a launcher needs only once

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
