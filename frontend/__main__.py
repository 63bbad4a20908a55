"""`python -m frontend` is `pagetide`."""

from frontend.cli import app

if __name__ == "__main__":
    app(prog_name="pagetide")
