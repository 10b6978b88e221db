"""``python -m cnr_store.cli``: the command `cnr` where scripts are not on the path."""

from cnr_store.cli.app import main

main()
