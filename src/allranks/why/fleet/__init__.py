"""Over many jobs: how each of them ended (`allranks why --epilog`), and which node breaks them (`why --history`)."""
