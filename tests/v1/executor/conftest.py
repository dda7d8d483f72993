from tests.v1.worker.worker_fakes import made as made
