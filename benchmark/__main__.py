import sys

from benchmark.commands import main

sys.exit(main())
