from kvbus.cli import app

app()
