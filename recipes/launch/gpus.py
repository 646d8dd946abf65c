"""The GPUs of a pod, as their driver identifies them."""


def read_gpu_uuids() -> list[str]:
    """UUIDs of all GPUs that this container sees; none without a driver, also where a cluster only simulates GPUs."""
    import pynvml  # loads the driver's library, which a launcher needs once

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
