"""How much anonymous memory a process holds at most: what a test puts before the program that it runs."""

WATCH = """
import sys, threading, time
from contextlib import contextmanager
from deepinfer.kernels.openmp import limit_spinning
limit_spinning()

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

@contextmanager
def watched():
    # Yields a list of samples, in bytes beyond what was held before.
    before, grown, ended = anonymous(), [], threading.Event()
    def watch():
        while not ended.is_set():
            grown.append(anonymous() - before)
            time.sleep(0.0005)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        grown.append(anonymous() - before)
        ended.set()
        watcher.join()
"""
