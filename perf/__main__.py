from perf.cli import main

main()
