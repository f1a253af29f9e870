"""Shows how images were decoded.

recording.py stores the steps of one image; race_page.py and film.py replay recordings side by side; app.py
is the page of `main.py demo`, where a visitor starts a race.
"""

import lab as lab  # its rows of METHODS may race, too
