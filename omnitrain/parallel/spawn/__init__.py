"""Run functions on ranks as child processes: the pool, its workers, their errors, support for notebooks."""
