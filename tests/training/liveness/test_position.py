"""The position of a rank is taken from its threads, and keeps nothing of them alive."""

import gc
import threading
import weakref

from megatrain.training.liveness.position import main_thread_frames


class Activation:
    """Stands for a tensor that a pass of another thread holds."""


def test_the_variables_of_other_threads_are_freed_without_a_garbage_collection() -> None:
    alive: list[weakref.ref[Activation]] = []
    begun, seen = threading.Event(), threading.Event()

    def compute() -> None:
        held = Activation()
        alive.append(weakref.ref(held))
        begun.set()
        seen.wait()

    thread = threading.Thread(target=compute)
    gc.disable()
    try:
        thread.start()
        begun.wait()
        watch = threading.Thread(target=main_thread_frames)
        watch.start()
        watch.join()
        main_thread_frames()
        seen.set()
        thread.join()
        assert alive[0]() is None
    finally:
        gc.enable()
