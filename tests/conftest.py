"""Settings that must be made before anything imports torch."""

from worker_service.platforms.openmp import let_waiting_threads_sleep

let_waiting_threads_sleep()
