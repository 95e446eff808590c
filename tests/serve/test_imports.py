import subprocess
import sys


def test_the_http_process_never_imports_torch():
    code = (
        "import sys, treadle.serve.commands.serve, treadle.serve.app, treadle.serve.metrics\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
